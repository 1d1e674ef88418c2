"""Cubins, each compiled once: in the process, on disk for all processes, or before that in the wheel.

A file on disk is named by a digest of all that the compiler reads and of the version of NVRTC, so no compiler takes
what another one made. A cubin that a wheel brings (``cubins/`` beside its source) is named by the target and the
digest of what the compiler read alone: it serves where there is no NVRTC to ask for its version, and which one made it
was settled when the wheel was built. It comes first; after a change of the source or an option its name fits no more.

Each file begins with the digest of the rest: what was cut off is made again, not trusted. Files are written beside
their place and moved there in one step, so that any number of processes may read and write at once. That digest is no
signature, and what is read runs on the GPU: a folder is used only if nobody but its owner, who is this user or root,
and their group can write into it.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
import warnings
from contextlib import suppress
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from threading import Lock

from rl_kernels.core.cuda import toolchain
from rl_kernels.core.cuda.program import SHIPPED, CompileError, Inputs, Program, compile_program, inputs_of

VARIABLE = "RL_KERNELS_CACHE"
SUFFIX = ".cubin"
WRITING = ".writing-"
OWN = re.compile(rf"([0-9a-f]{{64}}|{re.escape(WRITING)}.+){re.escape(SUFFIX)}")
"""Names of the files that are written here; all others in the folder are left alone."""
LIMIT = 256 * 2**20
"""Bytes on disk above which the files that were not used for longest go."""

ADVICE = f"set {VARIABLE} to a folder of your own that can be read and written"

_memory: dict[Program, bytes] = {}
_lock = Lock()
_warned: set[str] = set()


def folder() -> Path:
    """Return the folder of the cache, which need not exist.

    Raises:
        RuntimeError: nothing tells where the user's home is.
    """
    given, shared = os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given).expanduser()
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "rl-kernels"


def trouble() -> str | None:
    """Say why nothing can be kept on disk, or return None; writes nothing."""
    try:
        place = folder()
        reason = _why_unsafe(place)
        there = next(path for path in (place, *place.absolute().parents) if path.exists())
    except (RuntimeError, OSError) as error:
        return f"{error}; {ADVICE}"
    if reason is None and not (there.is_dir() and os.access(there, os.R_OK | os.W_OK | os.X_OK)):
        reason = f"{place} cannot be written"
    return reason and f"{reason}; {ADVICE}"


def _why_unsafe(place: Path) -> str | None:
    """Say who else could put files into the folder, or return None; it need not exist."""
    try:
        status = place.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if status.st_mode & stat.S_IWOTH:
        return f"{place} can be written by everybody, so what it holds is not trusted"
    # Windows has no such owners.
    if hasattr(os, "geteuid") and status.st_uid not in (os.geteuid(), 0):
        return f"{place} belongs to another user, so what it holds is not trusted"
    return None


def cubin_of(program: Program) -> bytes:
    """Return the cubin of a program: from memory, the wheel, the disk, or compiled now.

    Raises:
        CompileError: it has to be compiled, and cannot be.
    """
    found = _memory.get(program)
    if found is None:
        with _lock:
            found = _memory.get(program) or _found(program)
            _memory[program] = found
    return found


def _found(program: Program) -> bytes:
    inputs = inputs_of(program)
    shipped = files(program.package) / SHIPPED / shipped_name(program, inputs)
    found = unsealed(shipped.read_bytes()) if shipped.is_file() else None
    if found is not None:
        return found
    reason = toolchain.why_no_compiler()
    if reason:
        raise CompileError(f"{program}: {reason}")
    return _from_disk(program, inputs)


def shipped_name(program: Program, inputs: Inputs) -> str:
    """Return the name of the file in which a wheel brings the cubin of a program."""
    return f"{program.arch}-{inputs.digest()}{SUFFIX}"


def ships(package: str, arch: str) -> bool:
    """Say whether a package brings any cubins for a target."""
    brought = files(package) / SHIPPED
    return brought.is_dir() and any(file.name.startswith(f"{arch}-") for file in brought.iterdir())


def path_of(inputs: Inputs) -> Path:
    """Return where the disk keeps the cubin of what the compiler read; raises as ``folder``."""
    return folder() / f"{inputs.digest(str(toolchain.nvrtc_version()))}{SUFFIX}"


def _from_disk(program: Program, inputs: Inputs) -> bytes:
    try:
        path = path_of(inputs)
        reason = _why_unsafe(path.parent)
    except (RuntimeError, OSError) as error:
        reason = str(error)
    if reason:
        _warn(reason)
        return compile_program(program).cubin
    found = _read(path)
    if found is None:
        found = compile_program(program).cubin
        keep(path, found)
    return found


def _read(path: Path) -> bytes | None:
    try:
        found = unsealed(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(str(error))
        return None
    # Of another user, or on a disk that cannot be written, it can be used all the same.
    with suppress(OSError):
        os.utime(path)
    return found


def sealed(cubin: bytes) -> bytes:
    """Return what a file of the cache holds: the digest of a cubin, and the cubin."""
    return sha256(cubin).digest() + cubin


def unsealed(content: bytes) -> bytes | None:
    """Return the cubin in a file's content, or None if it is not what was written."""
    size = sha256().digest_size
    cubin = content[size:]
    return cubin if cubin and sha256(cubin).digest() == content[:size] else None


def keep(path: Path, cubin: bytes) -> None:
    """Write a cubin for all processes; where that is not possible, warn once and go on without."""
    try:
        store(path, cubin)
    except OSError as error:
        _warn(str(error))


def store(path: Path, cubin: bytes) -> None:
    """Write a cubin for all processes, and remove what has not been used for longest; ``OSError`` if it cannot be."""
    # Whatever the umask, not for everybody to write into: such a folder would not be trusted.
    path.parent.mkdir(mode=0o775, parents=True, exist_ok=True)
    write(path, cubin)
    _prune(path.parent)


def write(path: Path, cubin: bytes) -> None:
    """Write the file of a cubin in one step."""
    handle, name = tempfile.mkstemp(suffix=SUFFIX, prefix=WRITING, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(sealed(cubin))
        # mkstemp gives it to its user alone; what one user compiled into a shared folder serves all.
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def contents(place: Path) -> list[tuple[float, int, Path]]:
    """Return time of last use, size and path of each file of ours in a folder, the longest unused first."""
    found = []
    for path in place.iterdir() if place.is_dir() else ():
        try:
            status = path.lstat()
        except FileNotFoundError:
            # Another process has removed it.
            continue
        if OWN.fullmatch(path.name) and stat.S_ISREG(status.st_mode):
            found.append((status.st_mtime, status.st_size, path))
    return sorted(found)


def _prune(place: Path) -> None:
    held = contents(place)
    total = sum(size for _, size, _ in held)
    for _, size, path in held:
        if total <= LIMIT:
            return
        path.unlink(missing_ok=True)
        total -= size


def _warn(reason: str) -> None:
    if VARIABLE in _warned:
        return
    _warned.add(VARIABLE)
    text = f"the cache of compiled kernels cannot be used ({reason}), so each process compiles them anew"
    warnings.warn(f"{text}; {ADVICE}", RuntimeWarning, stacklevel=2)
