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
def run(pytester, monkeypatch):
    """Return ``run(source, *arguments, gpu)``, which runs a test module of that source with no plugin but ours."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    # This process has imported the plugin, so pytest cannot rewrite it any more.
    ignored = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    pytester.makeini(f"[pytest]\nfilterwarnings =\n    error\n    {ignored}")

    def run_source(source, *arguments, gpu=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
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


def test_gpu_tests_are_marked_and_skipped_with_a_reason_where_there_is_no_gpu(run):
    result = run(GPU_TESTS)
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED [[]2[]] *: needs a GPU, and torch sees none"])
    run(GPU_TESTS, "-m", "gpu").assert_outcomes(skipped=2, deselected=2)
    run(GPU_TESTS, "-m", "slow").assert_outcomes(passed=1, deselected=3)
    run("", "--markers").stdout.fnmatch_lines(["@pytest.mark.gpu: *", "@pytest.mark.slow: *"])


def test_gpu_tests_run_where_there_is_one(run):
    source = """
        import pytest

        @pytest.mark.gpu
        @pytest.mark.parametrize("right", [True, False])
        def test_gpu(right):
            assert right
        """
    run(source, gpu=True).assert_outcomes(passed=1, failed=1)


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


def test_memory_of_a_module_is_poisoned_and_state_restored_after_failures(run):
    before = torch.get_num_threads()
    source = """
        import pytest, torch

        pytestmark = pytest.mark.usefixtures("poisoned_empty")

        def test_poison():
            assert torch.empty(3).isnan().all()
            assert torch.ones(2).new_empty(3).isnan().all()

        def test_threads(torch_threads):
            with torch_threads(torch.get_num_threads() + 1):
                raise KeyError
        """
    run(source).assert_outcomes(passed=1, failed=1)
    assert torch.get_num_threads() == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_fixtures(rl_batch, seed, device):
    batch = rl_batch(num_prompts=3, dtype=torch.bfloat16)
    assert batch.metadata["seed"] == seed
    assert torch.equal(batch.input_ids, make_synthetic_rl_kernel_batch(3, seed=seed).input_ids)
    assert rl_batch(seed=5).metadata["seed"] == 5
    assert torch.zeros(1, device=device).device.type == device.type
