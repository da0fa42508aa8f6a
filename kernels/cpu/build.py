"""Builds the C++ extension once per source, torch and processor, into a cache folder that the caller names.

Called by `native` at first use and by the set-up (`python -m cohort.kernels.cpu.build FOLDER`); in a container with
`--built FOLDER`, where its image has what was compiled while it was made: right for a processor of the same kind. Runs
the compiler directly: a few files need no build system. Two processes that build at once are serialised by a file lock,
and the library appears by an atomic rename, so a reader never sees half of one. Never loads the library.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from cohort.kernels.errors import KernelBuildError

SOURCE_DIR = Path(__file__).resolve().parent.parent / "csrc"
LIBRARY_NAME = "cohort_kernels.so"
COMPILE_FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-DNDEBUG",
)
BUILD_TIMEOUT_S = 900.0  # half a minute on two idle cores; a loaded machine takes many times that
_LOCK_RETRY_S = 0.1
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def _quiet(_: str) -> None:
    return None


def find_compiler() -> str | None:
    """Return `$CXX`, else the first C++ compiler on the path."""
    candidates = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def _cpu_identity() -> str:
    """Return what -march=native may depend on: the instruction sets of this processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.partition(":")[2].split()))
    return f"{platform.machine()} {platform.processor()}"


def _refused_flags() -> tuple[str, ...]:
    """Return flags that leave out Intel's matrix unit where the system does not let this process use it."""
    if "amx_tile" not in _cpu_identity().split():
        return ()
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    granted = ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0
    return () if granted else ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")


def build_key() -> str:
    """Return the name of a build: same key, same library."""
    digest = hashlib.sha256()
    for source in sorted(path for path in SOURCE_DIR.iterdir() if path.suffix in {".h", ".cpp"}):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    abi = torch.compiled_with_cxx11_abi()
    digest.update(f"{torch.__version__} {abi} {COMPILE_FLAGS} {_refused_flags()} {_cpu_identity()}".encode())
    return digest.hexdigest()[:24]


def library_path(cache: Path) -> Path:
    """Return where the built library of this source, torch and processor lies in the cache folder."""
    return cache / "kernels" / build_key() / LIBRARY_NAME


@contextlib.contextmanager
def _build_lock(path: Path) -> Iterator[None]:
    """Let one builder in at a time. The lock file stays; a crashed holder's lock ends with its process."""
    deadline_s = time.monotonic() + BUILD_TIMEOUT_S
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # flock knows no deadline of its own, so it is asked again
                if time.monotonic() > deadline_s:
                    raise KernelBuildError(f"another build holds {path} for {BUILD_TIMEOUT_S:.0f} s") from None
                time.sleep(_LOCK_RETRY_S)
        yield


def _close_to_others(library: Path) -> None:
    """Leave the library, its folder and the folder of all builds to their owner: set-up runs under the usual umask, and
    an older version left them open. What belongs to another user stays as it is."""
    build_folder = library.parent
    for path in (build_folder.parent, build_folder, *build_folder.iterdir()):
        with contextlib.suppress(OSError):
            if (mode := stat.S_IMODE(path.stat().st_mode)) & _OTHERS:
                path.chmod(mode & ~_OTHERS)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise KernelBuildError(f"{command[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def _openmp_link_flags(torch_lib: Path) -> list[str]:
    """Return flags for torch's own OpenMP runtime if it brings one: a second one would have threads of its own."""
    bundled = sorted(torch_lib.glob("libgomp*.so*"))
    return [str(bundled[0])] if bundled else ["-fopenmp"]


def _compile(compiler: str, work: Path, report: Callable[[str], None]) -> Path:
    root = Path(torch.__file__).parent
    include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    refused = _refused_flags()
    sources = sorted(SOURCE_DIR.glob("*.cpp"), key=lambda source: -source.stat().st_size)  # the longest first
    objects = [work / f"{source.stem}.o" for source in sources]
    report(f"compiling 0/{len(sources)}")
    with ThreadPoolExecutor(max_workers=max(1, min(len(sources), os.cpu_count() or 1))) as pool:
        jobs = [
            pool.submit(_run, [compiler, *COMPILE_FLAGS, *refused, abi, *include, "-c", str(source), "-o", str(target)])
            for source, target in zip(sources, objects, strict=True)
        ]
        for done, job in enumerate(as_completed(jobs), start=1):
            job.result()
            report(f"compiling {done}/{len(sources)}")
    library = work / LIBRARY_NAME
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", *_openmp_link_flags(root / "lib")]
    _run([compiler, "-shared", "-o", str(library), *map(str, objects), *libraries])
    return library


def build(cache: Path, report: Callable[[str], None] = _quiet, *, force: bool = False) -> Path:
    """Return the path of the built library in `cache`; build it unless it is there. `report` gets a few words a step.

    Raises KernelBuildError when there is no compiler or it fails.
    """
    target = library_path(cache)
    if target.exists() and not force:
        _close_to_others(target)
        return target
    compiler = find_compiler()
    if compiler is None:
        raise KernelBuildError("no C++ compiler found (set CXX, or install g++)")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _build_lock(target.parent / "lock"):
            if target.exists() and not force:  # another process built it meanwhile
                return target
            with tempfile.TemporaryDirectory(dir=target.parent) as work:
                _compile(compiler, Path(work), report).replace(target)
            _close_to_others(target)
    except OSError as error:
        raise KernelBuildError(f"cannot write to {target.parent}: {error}") from error
    return target


def take_built(built: Path, cache: Path) -> bool:
    """Copy the library from another cache folder. Return whether there is one for this source, torch and processor."""
    source, target = library_path(built), library_path(cache)
    if target.exists() or not source.exists():
        return target.exists()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            Path(shutil.copy(source, work)).replace(target)
        _close_to_others(target)
    except OSError as error:
        raise KernelBuildError(f"cannot write to {target.parent}: {error}") from error
    return True


def main() -> int:
    """Build with one line of progress, for people and set-up scripts."""
    parser = argparse.ArgumentParser(prog="python -m cohort.kernels.cpu.build", description="Build the C++ kernels.")
    parser.add_argument("cache", type=Path, metavar="FOLDER", help="Cohort's cache folder")
    parser.add_argument("--built", type=Path, metavar="FOLDER", help="a cache folder that may have them already")
    options = parser.parse_args()
    cache: Path = options.cache
    started_s = time.monotonic()

    def show(message: str) -> None:
        print(f"kernels: {message} ({time.monotonic() - started_s:.0f} s)", flush=True)

    try:
        if options.built is not None and not take_built(options.built, cache):
            show(f"{options.built} has none for this processor")
        path = build(cache, show)
    except KernelBuildError as error:
        show("not built; the torch reference will be used")
        print(error, file=sys.stderr)
        return 1
    show(f"ready: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
