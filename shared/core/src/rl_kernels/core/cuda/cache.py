"""Cubins, each compiled once: kept in the process, on disk for all processes, or shipped in the wheel.

A file on disk is named by a digest of everything that the compiler reads and of the version of NVRTC, so no version
uses another one's cubins. A cubin in a wheel (``cubins/`` beside its source) is named by the target and the digest of
what the compiler read. The version of NVRTC is not part of the name: it was fixed when the wheel was built, and there
may be no NVRTC here. Shipped cubins come first; after a change of the source or of an option no name matches.

Each file begins with a digest of the cubin after it, so a truncated file is detected and compiled again. Files are
written under another name and renamed, so any number of processes may read and write at once. The digest is no
signature, and what is read runs on the GPU: a folder is used only if its owner is this user or root, and only owner and
group can write to it.
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
"""Names of the files that this module writes; other files in the folder are left alone."""
LIMIT = 256 * 2**20
"""Size of the cache in bytes above which the least recently used files are removed."""

ADVICE = f"set {VARIABLE} to a folder of your own that can be read and written"

_memory: dict[Program, bytes] = {}
_lock = Lock()
_warned: set[str] = set()


def folder() -> Path:
    """Return the folder of the cache, which need not exist.

    Raises:
        RuntimeError: the user's home folder is unknown.
    """
    own, cache_home = os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(cache_home).expanduser() if cache_home else Path.home() / ".cache") / "rl-kernels"


def trouble() -> str | None:
    """Return why cubins cannot be kept on disk, or None; writes nothing."""
    try:
        place = folder()
        reason = _why_unsafe(place)
        existing = next(path for path in (place, *place.absolute().parents) if path.exists())
    except (RuntimeError, OSError) as error:
        return f"{error}; {ADVICE}"
    if reason is None and not (existing.is_dir() and os.access(existing, os.R_OK | os.W_OK | os.X_OK)):
        reason = f"{place} cannot be written"
    return reason and f"{reason}; {ADVICE}"


def _why_unsafe(place: Path) -> str | None:
    """Return who else could write to the folder, or None; it need not exist."""
    try:
        status = place.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if status.st_mode & stat.S_IWOTH:
        return f"{place} can be written by everybody, so what it holds is not trusted"
    # Windows has no such owner.
    if hasattr(os, "geteuid") and status.st_uid not in (os.geteuid(), 0):
        return f"{place} belongs to another user, so what it holds is not trusted"
    return None


def cubin_of(program: Program) -> bytes:
    """Return the cubin of a program, from memory, the wheel or the disk, or compiled now.

    Raises:
        CompileError: it is not cached and cannot be compiled.
    """
    cubin = _memory.get(program)
    if cubin is None:
        with _lock:
            cubin = _memory.get(program) or _loaded_or_compiled(program)
            _memory[program] = cubin
    return cubin


def _loaded_or_compiled(program: Program) -> bytes:
    inputs = inputs_of(program)
    shipped = files(program.package) / SHIPPED / shipped_name(program, inputs)
    cubin = unsealed(shipped.read_bytes()) if shipped.is_file() else None
    if cubin is not None:
        return cubin
    reason = toolchain.why_no_compiler()
    if reason:
        raise CompileError(f"{program}: {reason}")
    return _from_disk(program, inputs)


def shipped_name(program: Program, inputs: Inputs) -> str:
    """Return the name of the file in which a wheel ships the cubin of a program."""
    return f"{program.arch}-{inputs.digest()}{SUFFIX}"


def ships(package: str, arch: str) -> bool:
    """Return whether a package ships any cubins for a target."""
    cubins = files(package) / SHIPPED
    return cubins.is_dir() and any(file.name.startswith(f"{arch}-") for file in cubins.iterdir())


def path_of(inputs: Inputs) -> Path:
    """Return the path on disk of the cubin for these inputs; raises as ``folder``."""
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
    cubin = _read(path)
    if cubin is None:
        cubin = compile_program(program).cubin
        keep(path, cubin)
    return cubin


def _read(path: Path) -> bytes | None:
    try:
        cubin = unsealed(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(str(error))
        return None
    # A file of another user, or on a read-only disk, can still be used.
    with suppress(OSError):
        os.utime(path)
    return cubin


def sealed(cubin: bytes) -> bytes:
    """Return the content of a cache file: the digest of a cubin, then the cubin."""
    return sha256(cubin).digest() + cubin


def unsealed(content: bytes) -> bytes | None:
    """Return the cubin in a file's content, or None if its digest does not match."""
    size = sha256().digest_size
    cubin = content[size:]
    return cubin if cubin and sha256(cubin).digest() == content[:size] else None


def keep(path: Path, cubin: bytes) -> None:
    """Write a cubin for all processes; if that fails, warn once and go on."""
    try:
        store(path, cubin)
    except OSError as error:
        _warn(str(error))


def store(path: Path, cubin: bytes) -> None:
    """Write a cubin for all processes, and remove the least recently used ones; ``OSError`` if it cannot be written."""
    # Never writable by everybody, whatever the umask: such a folder would not be trusted.
    path.parent.mkdir(mode=0o775, parents=True, exist_ok=True)
    write(path, cubin)
    _prune(path.parent)


def write(path: Path, cubin: bytes) -> None:
    """Write the file of a cubin atomically."""
    handle, name = tempfile.mkstemp(suffix=SUFFIX, prefix=WRITING, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(sealed(cubin))
        # mkstemp makes it readable by its user alone; in a shared folder all users may read it.
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def contents(place: Path) -> list[tuple[float, int, Path]]:
    """Return time of last use, size and path of each cache file in a folder, the least recently used first."""
    entries = []
    for path in place.iterdir() if place.is_dir() else ():
        try:
            status = path.lstat()
        except FileNotFoundError:
            # Another process has removed it.
            continue
        if OWN.fullmatch(path.name) and stat.S_ISREG(status.st_mode):
            entries.append((status.st_mtime, status.st_size, path))
    return sorted(entries)


def _prune(place: Path) -> None:
    entries = contents(place)
    total = sum(size for _, size, _ in entries)
    for _, size, path in entries:
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
