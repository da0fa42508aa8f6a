"""Section: the kernels at tiny shapes under NVIDIA's compute-sanitizer, where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.guard import NotThere

_NAME = "compute-sanitizer"
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
_FOUND_ERRORS = 9
_SECONDS = 60.0


def run(check: Check) -> None:
    check.guard.item("memcheck over the kernels", lambda: _memcheck(check), _SECONDS)


def _memcheck(check: Check) -> None:
    """On a processor the same command without the tool, which shows that it runs and nothing of memory."""
    dry = check.device.type != "cuda"
    tool = [] if dry else [_tool(), "--tool", "memcheck", "--error-exitcode", str(_FOUND_ERRORS)]
    log = check.logs / "memcheck.log"
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else torch's pools hide what lies outside
    section = ["-m", "cohort.services.bench.gpu_check", "kernels", "--device", str(check.device), "--tiny"]
    section += ["--folder", str(check.folder / "memcheck"), "--logs", str(check.logs)]
    seconds = max(5.0, check.guard.left_s - 3)
    with log.open("wb") as out:
        try:
            status = subprocess.run(
                [*tool, sys.executable, "-P", *section],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=seconds,
                check=False,
                env=environment,
            ).returncode
        except subprocess.TimeoutExpired:
            check.found.said("memcheck over the kernels", f"not done after {seconds:.0f} s", "not run")
            return
    words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
    how = "without the tool, " if dry else ""
    check.found.checked("memcheck over the kernels", status == 0, f"{how}status {status}: {' / '.join(words)[:300]}")


def _tool() -> str:
    """Raises `NotThere`."""
    found = shutil.which(_NAME)
    if found is None:
        found = next((str(Path(place) / _NAME) for place in _PLACES if (Path(place) / _NAME).is_file()), None)
    if found is None:
        raise NotThere(_NAME)
    return found
