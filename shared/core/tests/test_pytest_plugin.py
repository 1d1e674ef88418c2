import pytest
import torch

from rl_kernels.core.testing import make_synthetic_rl_kernel_batch, poisoned_empty

pytest_plugins = "pytester"


@pytest.fixture(scope="module", autouse=True)
def imports():
    """Have torch import what that mode needs: pytester takes back later imports, and torch bears none twice."""
    with poisoned_empty():
        pass


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def run(pytester, monkeypatch):
    """Return ``run(source, *arguments)``, which runs a test module of that source with no plugin but ours."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\nfilterwarnings = error")

    def run_source(source, *arguments):
        pytester.makepyfile(source)
        plugin = ("-p", "rl_kernels.core.pytest_plugin", "-p", "no:cacheprovider")
        return pytester.runpytest_inprocess(*plugin, "--strict-markers", "-rs", *arguments)

    return run_source


GPU_TESTS = """
    import pytest

    @pytest.fixture
    def never():
        raise AssertionError("set up all the same")

    @pytest.mark.gpu
    def test_gpu(never):
        pass

    @pytest.mark.slow
    def test_slow():
        pass

    def test_device(device):
        assert device.type == "cpu"
    """


def test_gpu_tests_are_skipped_with_a_reason_where_there_is_no_gpu(run, no_gpu):
    result = run(GPU_TESTS)
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED [[]2[]] *: needs a GPU, and torch sees none"])


def test_gpu_tests_can_be_selected(run, no_gpu):
    run(GPU_TESTS, "-m", "gpu").assert_outcomes(skipped=2, deselected=2)
    run(GPU_TESTS, "-m", "slow").assert_outcomes(passed=1, deselected=3)


def test_gpu_tests_run_where_there_is_one(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    source = """
        import pytest

        @pytest.mark.gpu
        def test_gpu():
            pass

        @pytest.mark.gpu
        def test_fails():
            assert False
        """
    run(source).assert_outcomes(passed=1, failed=1)


def test_markers_are_described(run):
    run("", "--markers").stdout.fnmatch_lines(["@pytest.mark.gpu: *", "@pytest.mark.slow: *"])


def test_seeds_follow_from_the_names_of_tests(run):
    source = """
        import pytest

        SEEDS = {}

        @pytest.mark.parametrize("repeat", [0, 1])
        def test_seed(seed, repeat, request):
            SEEDS[request.node.name] = seed

        def test_they_differ_and_stay():
            assert len(set(SEEDS.values())) == 2
            assert SEEDS["test_seed[0]"] == EXPECTED
        """
    # zlib.crc32 of the name: another value would mean that runs differ.
    run(source.replace("EXPECTED", str(2339839339))).assert_outcomes(passed=3)


def test_state_is_restored_after_failures(run):
    before = torch.get_num_threads()
    source = """
        import pytest, torch

        def test_threads(torch_threads):
            with torch_threads(torch.get_num_threads() + 1):
                raise KeyError

        def test_poison(poisoned_empty):
            assert not torch.empty(3).isnan().all()
        """
    run(source).assert_outcomes(failed=2)
    assert torch.get_num_threads() == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_module_can_be_poisoned(run):
    source = """
        import pytest, torch

        pytestmark = pytest.mark.usefixtures("poisoned_empty")

        def test_poison():
            assert torch.empty(3).isnan().all()

        def test_too():
            assert torch.ones(2).new_empty(3).isnan().all()
        """
    run(source).assert_outcomes(passed=2)


def test_fixture_torch_threads(torch_threads):
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_fixture_rl_batch(rl_batch, seed):
    batch = rl_batch(num_prompts=3, dtype=torch.bfloat16)
    assert batch.metadata["seed"] == seed
    assert torch.equal(batch.input_ids, make_synthetic_rl_kernel_batch(3, seed=seed).input_ids)
    assert rl_batch(seed=5).metadata["seed"] == 5


def test_fixture_poisoned_empty(poisoned_empty):
    assert torch.empty(2).isnan().all()


def test_fixture_device(device):
    assert torch.zeros(1, device=device).device.type == device.type
