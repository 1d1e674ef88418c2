"""The jobs of this repository; `nox -l` lists them, `nox -s NAME` runs one, `nox -s NAME -- ARGS` passes arguments on.

Packages are found in the tree, so none is listed here. PyTorch is installed once, in a base environment that most
sessions borrow. `build` borrows only its own PyTorch, and so proves that each package declares what it needs.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import nox

ROOT = Path(__file__).parent
SHARED = {file.parent.name: file.parent for file in sorted(ROOT.glob("shared/*/pyproject.toml"))}
PACKAGES = {file.parent.name: file.parent for file in sorted(ROOT.glob("packages/*/pyproject.toml"))}
META, MODELS = "rl-kernels", "models"
OPERATORS = [name for name in PACKAGES if name not in (META, MODELS)]
LAB = "lab"
PAIR = ("linear-logp", "grpo-loss")
"""Operators that `build` installs one after the other, in both orders."""
OWN = (META, "torch")
"""How the requirements begin that `build` does not take from others."""
INTEGRATION = "integration"

CONSTRAINTS = ROOT / "constraints.txt"
PINNED = ("-c", str(CONSTRAINTS))
BASE = ROOT / ".nox" / "base"
BASE_REQUIREMENTS = (
    "torch",
    "numpy",
    "rich",
    "matplotlib",
    "hatchling",
    "editables",
    "pytest",
    "pytest-xdist",
    "hypothesis",
)

# The oldest PyTorch that pyproject.toml allows. Its wheel includes CUDA (gigabytes), so run it before a release only,
# with the oldest Python too (`--force-python`).
FLOOR = ("torch==2.11.0", "numpy<2.4")

# What verl's engine and models need, without its servers; its transformers is older than the one of other sessions.
VERL = (
    *("transformers==5.10.4", "accelerate", "codetiming", "datasets", "hydra-core", "orjson", "peft", "pillow", "ray"),
    *("tensordict", "torchdata"),
)

# What vLLM's engine imports for a dense model, without its servers and without its own PyTorch. Its transformers is
# older than the one of other sessions.
VLLM = (
    *("transformers==5.19.0", "aiohttp", "cachetools", "cbor2", "cloudpickle", "compressed-tensors==0.17.0", "einops"),
    *("fastapi<0.137", "llguidance<1.8", "msgspec", "openai", "oss-harmony", "partial-json-parser", "pillow"),
    *("prometheus_client", "psutil", "py-cpuinfo", "pybase64", "pyzmq", "requests", "uvloop", "xgrammar==0.2.8"),
    # Its server.
    *("model-hosting-container-standards", "prometheus-fastapi-instrumentator", "uvicorn", "watchfiles"),
)

# The oldest transformers whose continuous batching is supported; it has attention names that later ones refuse.
TRANSFORMERS = ("transformers==5.17.0", "peft")
MET = ("attention", "continuous", "head", "logits", "running", "transformers")
"""The tests of models that use transformers."""

NVRTC = ("cuda-bindings", "nvidia-cuda-nvrtc")

# What `kernels` compiles before a change lands. Products and attention are compiled in BF16 alone: in FP16 the same
# kernels differ by the dtype of an instruction, and take at most two registers more or less. Of targets that share
# their sources all but sm_90 are compiled in BF16. `-- --arch all` compiles all.
HOPPER = ("--arch", "sm_90", "sm_90a")
CUDA_TARGETS = (
    (*HOPPER, "--dtype", "bf16", "fp32"),
    ("--arch", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "--dtype", "bf16"),
    *(
        (*HOPPER, "--dtype", "fp16", "--op", name, "--package", f"rl_kernels.{name}.backends.{backend}")
        for name, backend in {"fused_logp": "cuda", "linear_logp": "cuda_sm90"}.items()
    ),
)
# Triton launches and compiles the same for sm_80, sm_86 and sm_89, of which the last has the least memory. In FP32
# kernels use no units that sm_100, sm_120 and gfx950 have and the others lack.
TRITON_TARGETS = (
    ("--arch", "sm_89", "sm_90", "gfx942"),
    ("--arch", "sm_100", "sm_120", "gfx950", "--dtype", "bf16"),
)

# The interpreter of Triton 3.6 needs an older NumPy than the other sessions.
TRITON = {"3.6": ("triton==3.6.0", "numpy<2.4"), "3.9": ("triton==3.9.0",)}
# In the interpreter a kernel takes a thousand times longer, and the order of its sums is not that of a GPU, so bits are
# not checked. One version runs all other tests; the newest runs the operators' kernels once more, in FP16, but for
# those of `route`. Recorded launches need no interpreter. Planted bugs are tested by hand
# (`nox -s "interpreted(3.6)" -- -k "triton and planted"`) and on a GPU.
INTERPRETED = {
    "3.6": "triton and not repeatability and not invariance and not fp16 and not launches and not planted",
    "3.9": "triton and (accuracy or gradients) and fp16",
}

# Processes take all cores: threads of theirs would wait for each other, and must not spin meanwhile.
ONE_THREAD = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
OFFLINE = {"HF_HUB_OFFLINE": "1"}

# A borrowing environment has no pip of its own. It uses that of the base, and so avoids an older setuptools.
BORROWING = {"venv_backend": "venv", "venv_params": ["--without-pip"]}

nox.options.sessions = ["lint", "types", "tests", "docs"]
nox.options.default_venv_backend = "venv"


@nox.session(**BORROWING)
def demo(session: nox.Session) -> None:
    """Install everything and run the demo: GRPO training on the CPU, through the operators."""
    borrow(session)
    install(session, *SHARED, *PACKAGES)
    session.run("rl-kernels", "demo", *session.posargs)


@nox.session(**BORROWING)
@nox.parametrize("package", [nox.param(name, id=name) for name in (*SHARED, *PACKAGES, INTEGRATION)])
def tests(session: nox.Session, package: str) -> None:
    """Run the tests of one package with lab and its requirements installed, of core alone, or the integration tests."""
    borrow(session)
    present = [*SHARED, *PACKAGES]
    if package != INTEGRATION:
        wanted = {package, *siblings(package)} | ({*SHARED} if package != "core" else set())
        present = [name for name in present if name in wanted]
    install(session, *present)
    needed = wanted_by_tests(package)
    if needed:
        session.install(*PINNED, *needed)
    if package in (*SHARED, INTEGRATION):
        session.install(*PINNED, *NVRTC)
    session.run("python", "-m", "pip", "check")
    session.run("python", "tools/installed.py", *map(module, present))
    run_tests(session, [tests_of(package)])


@nox.session
def floor(session: nox.Session) -> None:
    """Run the tests of core, operators and models on the oldest PyTorch that is allowed, on the CPU."""
    tools = [name for name in BASE_REQUIREMENTS if name not in ("torch", "numpy")]
    session.install(*FLOOR, *tools)
    install(session, *SHARED, *OPERATORS, MODELS)
    # Planted bugs and the other relations are covered by `tests`; PyTorch versions differ in how they trace.
    chosen = "not triton and not planted and (torch or not test_relation)"
    run_tests(session, map(tests_of, ("core", *OPERATORS, MODELS)), "-k", chosen)


@nox.session(**BORROWING)
def trl(session: nox.Session) -> None:
    """Compare our scores and loss with TRL's own: the same tensors, small models of some families, a small trainer."""
    install_models(session)
    session.install(*PINNED, "trl", "transformers", "peft", "bitsandbytes", "torchao", "pytest-xdist")
    run_tests(session, sorted(tests_of(INTEGRATION).glob("test_trl*.py")), **OFFLINE)


@nox.session(**BORROWING)
def transformers(session: nox.Session) -> None:
    """Run the tests of models with the oldest transformers whose continuous batching is supported."""
    install_models(session)
    session.install(*TRANSFORMERS)
    run_tests(session, [tests_of(MODELS) / f"test_{name}.py" for name in MET], **OFFLINE)


@nox.session(**BORROWING)
def verl(session: nox.Session) -> None:
    """Run verl's FSDP engine, its patched models and the recipe's configuration, as far as possible without a GPU."""
    install_models(session)
    session.install(*VERL)
    session.install("--no-deps", "verl==0.9.1")
    session.install(*PINNED, "pytest-xdist")
    env = {**OFFLINE, "VERL_USE_EXTERNAL_MODULES": "rl_kernels.models.clients.verl"}
    run_tests(session, sorted(tests_of(INTEGRATION).glob("test_verl*.py")), **env)


@nox.session(**BORROWING)
def vllm(session: nox.Session) -> None:
    """Run vLLM's engine with the plugin on the CPU, alone and in TRL; compare its log-probs with those of training."""
    install_models(session)
    # vLLM's second model runner needs Triton, here its interpreter.
    session.install(*VLLM, "trl==1.16.0", "peft==0.21.2", "triton==3.7.1")
    session.install("--no-deps", "vllm==0.32.0")
    session.install(*PINNED, "pytest-xdist")
    names = ("vllm", "vllm_logprobs", "vllm_seams", "trl_vllm", "trl_server")
    run_tests(session, [tests_of(INTEGRATION) / f"test_{name}.py" for name in names], **OFFLINE)


@nox.session(**BORROWING)
@nox.parametrize("version", [nox.param(version, id=version) for version in TRITON])
def interpreted(session: nox.Session, version: str) -> None:
    """Run the tests of the Triton backends on the CPU, in Triton's interpreter."""
    borrow(session)
    tested = [*OPERATORS, MODELS]
    install(session, *SHARED, *tested)
    session.install(*TRITON[version])
    run_tests(session, map(tests_of, tested), "-k", INTERPRETED[version], TRITON_INTERPRET="1")


@nox.session(**BORROWING)
def kernels(session: nox.Session) -> None:
    """Compile the kernels without a GPU; `-- --arch all` compiles each in all dtypes and for all its targets.

    In CUDA a warning, a spill or a stack fails; in Triton what does not fit into a GPU's shared memory.
    """
    borrow(session)
    install(session, *SHARED, *OPERATORS)
    session.install(*PINNED, *NVRTC, TRITON["3.6"][0])
    kept = session.create_tmp()
    env = {"RL_KERNELS_CACHE": kept, "TRITON_CACHE_DIR": kept}
    for options in [session.posargs] if session.posargs else CUDA_TARGETS:
        session.run("rl-kernels", "compile", *options, env=env)
    for options in [session.posargs] if session.posargs else TRITON_TARGETS:
        session.run("rl-kernels", "compile", "--backend", "triton", *options, env=env)
    session.run("python", "-m", "pytest", "-q", "shared/lab/tests/test_compile_triton.py")


@nox.session(**BORROWING)
def check(session: nox.Session) -> None:
    """Check every relation on all cases for every backend that runs here."""
    borrow(session)
    install(session, *SHARED, *PACKAGES)
    # Each process may hold a gigabyte or two.
    jobs = ("--jobs", str(min(os.cpu_count() or 1, 4)))
    session.run("rl-kernels", "check", "--suite", "full", *jobs, *session.posargs, env=ONE_THREAD)


@nox.session(**BORROWING)
def mutation(session: nox.Session) -> None:
    """Draw mutants of the operators and count those that the tests catch; for the night: tests run for each."""
    borrow(session)
    install(session, *SHARED, *OPERATORS)
    session.install(*TRITON["3.6"])
    session.run("python", "tools/mutation.py", *(session.posargs or ("--json", "tools/results/mutation.json")))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, import boundaries, spelling and the Markdown files."""
    session.install(*PINNED, "ruff", "import-linter", "codespell", "pymarkdownlnt")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": source_path()})
    markdown = session.run("git", "ls-files", "*.md", external=True, silent=True).split()
    session.run("pymarkdown", "scan", *markdown)
    session.run("codespell", *session.run("git", "ls-files", external=True, silent=True).split())


@nox.session(**BORROWING)
def types(session: nox.Session) -> None:
    """Check the types of all packages, as one namespace."""
    borrow(session)
    session.install(*PINNED, "mypy")
    session.run("mypy", *source_path().split(os.pathsep), env={"MYPYPATH": source_path()})


@nox.session(**BORROWING)
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; every warning is an error."""
    borrow(session)
    install(session, *SHARED, *PACKAGES)
    session.install(*PINNED, "mkdocs", "mkdocs-material", "mkdocstrings-python", "ruff")
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def build(session: nox.Session) -> None:
    """Build sdists, and wheels from them, into dist/; check them, and install them from a local index in two orders."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.install(*PINNED, "hatchling", "twine", "check-wheel-contents")
    built = sdists_and_wheels(session, dist)
    session.run("twine", "check", "--strict", *map(str, built))
    at_once(partial(check_contents, session, dist, package) for package in folders())
    torch = made(session, "torch")
    pip = (python_of(torch), "-m", "pip")
    session.run(*pip, "install", "--quiet", "--no-compile", *PINNED, "torch", external=True)
    others = Path(session.create_tmp(), "others").resolve()
    shutil.rmtree(others, ignore_errors=True)
    options = ("--quiet", "--only-binary", ":all:", "--dest", str(others))
    session.run(*pip, "download", *options, *PINNED, *required_of_others(), external=True)
    index = indexed(session, [*built, *others.iterdir()])
    in_turn = [partial(prove_in_turn, session, *pair, index, torch) for pair in (PAIR, PAIR[::-1])]
    at_once([*in_turn, *(partial(prove, session, package, index, torch) for package in (LAB, *PACKAGES))])


@nox.session(**BORROWING)
def bench(session: nox.Session) -> None:
    """Run the benchmark of every operator: verify, then time."""
    borrow(session)
    install(session, *SHARED, *PACKAGES)
    session.run("rl-kernels", "bench", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Pack the wheels of `build`, the tests and a command that runs them, for a GPU machine without a network."""
    session.run(sys.executable, "tools/gpu_bundle.py", *session.posargs)


def borrow(session: nox.Session) -> None:
    """Give the session the packages of the base environment, which is made anew if its recipe has changed."""
    recipe = "\n".join((CONSTRAINTS.read_text(encoding="utf-8"), sys.version, *BASE_REQUIREMENTS))
    digest, mark = hashlib.sha256(recipe.encode()).hexdigest(), BASE / "made-from"
    if not mark.exists() or mark.read_text(encoding="utf-8") != digest:
        session.run(sys.executable, "-m", "venv", "--clear", str(BASE), external=True)
        python = str(BASE / "bin" / "python")
        session.run(python, "-m", "pip", "install", *PINNED, *BASE_REQUIREMENTS, external=True)
        mark.write_text(digest, encoding="utf-8")
    borrowed = purelib(session.virtualenv.location) / "borrowed.pth"
    borrowed.write_text(f"{purelib(str(BASE))}\n", encoding="utf-8")


def purelib(environment: str) -> Path:
    """Return the folder in which a virtual environment of this Python keeps installed packages."""
    return Path(sysconfig.get_path("purelib", "posix_prefix", {"base": environment}))


def install(session: nox.Session, *packages: str) -> None:
    """Install packages in editable mode, in one command: they pin each other, and no index has them."""
    wheels = [str(editable(session, folders()[name])) for name in packages]
    session.install("--no-index", "--no-deps", "--force-reinstall", *wheels)


def install_models(session: nox.Session) -> None:
    """Borrow the base environment, and install models with the packages that it requires."""
    borrow(session)
    install(session, *SHARED, *siblings(MODELS), MODELS)


def run_tests(session: nox.Session, places: Iterable[Path], *options: str, **env: str) -> None:
    """Run pytest with one process per core, of one thread each: most tests are too small for threads."""
    command = ("python", "-m", "pytest", "-n", "auto", "--dist", "worksteal", *options, *map(str, places))
    session.run(*command, *session.posargs, env={**ONE_THREAD, **env})


def editable(session: nox.Session, folder: Path) -> Path:
    """Return the wheel that installs a package in editable mode; it has no code, so all sessions share it."""
    read = [(folder / name).read_bytes() for name in ("pyproject.toml", "README.md", "LICENSE")]
    home = ROOT / ".nox" / "editable" / hashlib.sha256(b"".join([str(folder).encode(), *read])).hexdigest()
    if not home.exists():
        begun = home.with_suffix(".begun")
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir(parents=True)
        code = "import sys; from hatchling.build import build_editable; build_editable(sys.argv[1])"
        with session.chdir(folder):
            session.run("python", "-c", code, str(begun), silent=True)
        begun.rename(home)
    return next(home.glob("*.whl"))


def made(session: nox.Session, name: str, *options: str) -> Path:
    """Make an empty environment that lasts as long as the session."""
    home = Path(session.create_tmp(), name).resolve()
    session.run("python", "-m", "venv", "--clear", *options, str(home))
    return home


def python_of(home: Path) -> str:
    """Return the interpreter of an environment."""
    return str(home / "bin" / "python")


def sdists_and_wheels(session: nox.Session, dist: Path) -> list[Path]:
    """Build the sdist of every package into dist/sdist, and from these the wheels into dist; return all files."""
    for folder in folders().values():
        with session.chdir(folder):
            session.run("python", "-m", "hatchling", "build", "-t", "sdist", "-d", str(dist / "sdist"), silent=True)
    sdists = sorted(dist.glob("sdist/*.tar.gz"))
    command = ("python", "-m", "pip", "wheel", "--quiet", "--no-cache-dir", "--no-build-isolation", "--no-deps")
    command += ("--no-index", "--wheel-dir", str(dist))
    at_once(partial(session.run, *command, str(sdist)) for sdist in sdists)
    return [*sdists, *sorted(dist.glob("*.whl"))]


def check_contents(session: nox.Session, dist: Path, package: str) -> None:
    """Check that a wheel holds what the sources hold, no more and no less; made of an sdist, it holds no cubins."""
    wheel = next(dist.glob(f"{distribution(package).replace('-', '_')}-[0-9]*.whl"))
    options = ("--no-config", "--package-omit", "__pycache__,cubins", "--src-dir", str(folders()[package] / "src"))
    session.run("check-wheel-contents", *options, str(wheel))


def at_once(jobs: Iterable[Callable[[], object]]) -> None:
    """Run jobs on all cores; raise the first error."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        started = [pool.submit(job) for job in jobs]
        try:
            for each in started:
                each.result()
        finally:
            pool.shutdown(cancel_futures=True)


def required_of_others() -> list[str]:
    """Return what the packages require beside each other and PyTorch."""
    declared = (nox.project.load_toml(folder / "pyproject.toml")["project"] for folder in folders().values())
    return sorted({word for each in declared for word in each["dependencies"] if not word.startswith(OWN)})


def indexed(session: nox.Session, files: list[Path]) -> str:
    """Lay out a package index (PEP 503) that refers to these files; return its address."""
    home = Path(session.create_tmp(), "index").resolve()
    shutil.rmtree(home, ignore_errors=True)
    for file in files:
        page = home / re.sub(r"[-_.]+", "-", file.name.partition("-")[0]).lower() / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        before = page.read_text(encoding="utf-8") if page.exists() else "<!DOCTYPE html>\n"
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        link = f'<a href="{file.as_uri()}#sha256={digest}">{file.name}</a><br>\n'
        page.write_text(before + link, encoding="utf-8")
    return home.as_uri()


def prove(session: nox.Session, package: str, index: str, torch: Path) -> None:
    """Install one package in an environment of its own, with what it declares, and check what came."""
    home = beside(session, package, torch)
    install_from(session, index, home, package)
    check_installed(session, home, package)
    shutil.rmtree(home)


def prove_in_turn(session: nox.Session, first: str, second: str, index: str, torch: Path) -> None:
    """Install one package, then another, then all; uninstall the first, which must leave the others in place."""
    home = beside(session, f"{first}-{second}", torch)
    install_from(session, index, home, first)
    check_installed(session, home, first)
    install_from(session, index, home, second)
    check_installed(session, home, first, second)
    session.run(python_of(home), "-m", "pip", "uninstall", "--quiet", "--yes", distribution(first), external=True)
    check_installed(session, home, second)
    install_from(session, index, home, META)
    check_installed(session, home, META)
    shutil.rmtree(home)


def beside(session: nox.Session, name: str, torch: Path) -> Path:
    """Make an environment that sees PyTorch, what it needs and pip, which are the same for all."""
    home = made(session, name, "--without-pip")
    (purelib(str(home)) / "torch.pth").write_text(f"{purelib(str(torch))}\n", encoding="utf-8")
    return home


def install_from(session: nox.Session, index: str, home: Path, package: str) -> None:
    """Install a package from an index alone: no other index, folder or constraint that pip is configured with."""
    options = ("--isolated", "--disable-pip-version-check", "--quiet", "--no-compile", "--index-url", index)
    command = (python_of(home), "-m", "pip", "install", *options, distribution(package))
    session.run(*command, env={"PIP_CONFIG_FILE": os.devnull}, external=True)


def check_installed(session: nox.Session, home: Path, *packages: str) -> None:
    """Check that an environment has these packages and what they bring; import all, and list the operators."""
    python, parts = python_of(home), {name for package in packages for name in brought_by(package)}
    session.run(python, "-m", "pip", "check", external=True, silent=True)
    session.run(python, "tools/installed.py", "core", *sorted(map(module, parts)), external=True, silent=True)
    if packages == (META,):
        session.run(str(home / "bin" / "rl-kernels"), "list", external=True)


def distribution(package: str) -> str:
    """Return the name by which pip knows a package."""
    return package if package == META else f"{META}-{package}"


def brought_by(package: str) -> list[str]:
    """Return the packages that a wheel installs besides core; the meta-package pins those of the last version bump."""
    return [package, *siblings(package)]


def siblings(package: str) -> list[str]:
    """Return the packages of this repository that a package requires, except core."""
    declared = (folders()[package] / "pyproject.toml").read_text(encoding="utf-8")
    return [name for name in folders() if name != "core" and f'"rl-kernels-{name}==' in declared]


def folders() -> dict[str, Path]:
    """Return the folder of every package: first the shared ones, then the others."""
    return {**SHARED, **PACKAGES}


def source_path() -> str:
    """Return the source folders of all packages, as one search path."""
    return os.pathsep.join(str(folder / "src") for folder in folders().values())


def wanted_by_tests(package: str) -> list[str]:
    """Return what the tests of a package need that the base does not have: its dependency group ``test``."""
    if package == INTEGRATION:
        return ["transformers"]
    return nox.project.load_toml(folders()[package] / "pyproject.toml").get("dependency-groups", {}).get("test", [])


def tests_of(package: str) -> Path:
    """Return the folder of the tests that a session runs."""
    return ROOT / "tests_integration" if package == INTEGRATION else folders()[package] / "tests"


def module(package: str) -> str:
    """Return the name of a package's module in the namespace rl_kernels."""
    return "demo" if package == META else package.replace("-", "_")
