"""The build hook that puts cubins into the wheel of a package with CUDA kernels, if ``RL_KERNELS_CUBINS`` asks for it.

The variable names targets, ``RL_KERNELS_CUBINS="sm_90 sm_90a"``, or ``all``. Without it the hook does nothing: no torch
and no compiler is needed, and the wheel holds the sources alone. With it, ``rl-kernels compile`` of this tree writes
the cubins that the wheel brings; the environment needs torch, core's other dependencies, cuda-bindings and NVRTC.

The ``hatch_build.py`` of a package calls it in the tree; in an sdist that file refuses the variable.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "RL_KERNELS_CUBINS"
CORE = Path(__file__).parents[1] / "shared" / "core" / "src"
NEEDED = ("torch", "numpy")
"""What core imports; it says itself what is missing for CUDA."""
COMPILE = "import sys; from rl_kernels.core.precompile import main; sys.exit(main())"
GROUP = "rl_kernels.operators"


class Cubins(BuildHookInterface):
    """Adds a folder ``cubins`` beside the sources of the CUDA backend to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile for the targets that the variable names, and have the wheel include what came of it."""
        targets = os.environ.get(VARIABLE, "").split()
        # An editable install has its sources before it, and they change.
        if not targets or version == "editable":
            return
        (sources,) = {file.parent for file in Path(self.root).glob("src/rl_kernels/*/backends/*/*.cu")}
        place = sources.relative_to(Path(self.root, "src")) / "cubins"
        # Kept until the wheel is packed.
        self._made = TemporaryDirectory(prefix="rl-kernels-cubins-")
        cubins = self._compile(targets, Path(self._made.name))
        for target in targets:
            if target != "all" and not any(file.name.startswith(f"{target}-") for file in cubins):
                self.app.display_warning(f"{VARIABLE}: {self.metadata.name} has no kernels for {target}")
        build_data["force_include"].update({str(file): (place / file.name).as_posix() for file in cubins})

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled: the wheel has it."""
        if hasattr(self, "_made"):
            self._made.cleanup()

    def _compile(self, targets: list[str], folder: Path) -> list[Path]:
        missing = [name for name in NEEDED if find_spec(name) is None]
        if missing:
            where = "build with --no-build-isolation where rl-kernels-core[cuda] is installed"
            self._fail(f"{', '.join(missing)} not found: {where}")
        paths = [str(self._announced(folder)), str(CORE), str(Path(self.root, "src"))]
        search = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        out = folder / "cubins"
        names = [word for name in self._operators() for word in ("--op", name)]
        done = subprocess.run(
            [sys.executable, "-c", COMPILE, *names, "--out", str(out), "--arch", *targets],
            env={**os.environ, "PYTHONPATH": search},
            capture_output=True,
            text=True,
        )
        cubins = sorted(out.glob("*.cubin"))
        if done.returncode or not cubins:
            said = done.stderr.strip() or "nothing was compiled"
            # Unusable arguments are told in the last line, faults of a kernel in all of them.
            self._fail(said.splitlines()[-1] if done.returncode == 2 else said)
        return cubins

    def _operators(self) -> dict[str, str]:
        return self.metadata.core.entry_points[GROUP]

    def _announced(self, folder: Path) -> Path:
        """Announce the operators of a package that is not installed yet; return the folder to search."""
        announced = folder / "announced"
        info = announced / f"{self.metadata.name.replace('-', '_')}-{self.metadata.version}.dist-info"
        info.mkdir(parents=True)
        head = f"Metadata-Version: 2.1\nName: {self.metadata.name}\nVersion: {self.metadata.version}\n"
        (info / "METADATA").write_text(head, encoding="utf-8")
        lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in self._operators().items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return announced

    def _fail(self, reason: str) -> None:
        self.app.abort(f"{VARIABLE}={os.environ[VARIABLE]!r}: {reason}")
