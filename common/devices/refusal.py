"""The reason why a host's GPU cannot be used as it is, in one sentence with the cure: no silent fallback to the CPU.

Called by a worker before it loads anything. A GPU that is there and unusable is refused where `engine.device` is
`auto`: the CPU would serve the model at a hundredth of the speed. `engine.device: cpu` and an empty
`CUDA_VISIBLE_DEVICES` ask for the CPU and get it. Pure but for looking at files; the caller asks torch.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cohort.common.devices import inventory

# Oldest driver on Linux that runs a build for this CUDA (CUDA compatibility: minor versions of one major share a
# driver), the wheel family first; scripts/setup has the same table and a test holds the two equal.
DRIVER_FOR_FAMILY: Mapping[str, tuple[int, ...]] = {
    "cu130": (580, 65, 6),
    "cu129": (575, 51, 3),
    "cu126": (525, 60, 13),
}
_DRIVER_FOR_CUDA_MAJOR: Mapping[int, tuple[int, ...]] = {13: (580, 65, 6), 12: (525, 60, 13), 11: (450, 80, 2)}


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """The installed torch: its `cuda` build ("13.0", "" for a CPU build), whether CUDA works, and if not, why."""

    version: str
    cuda: str
    works: bool
    error: str = ""


def unusable_gpu(device: str, torch: TorchFacts, sources: inventory.Sources = inventory.HOST) -> str:
    """Describe why `engine.device` cannot be used although the host has an NVIDIA driver. "" if it can be, or without a
    driver: then torch's own error says all."""
    if torch.works or not (device == "auto" or device.startswith("cuda")):
        return ""
    if not inventory.driver_present(sources) or (device == "auto" and inventory.hidden()):
        return ""
    driver = inventory.driver_version(sources)
    error = f" (torch says: {torch.error})" if torch.error else ""
    need = "" if device == "auto" else f"; this configuration wants {device}"
    return (
        f"engine.device: a GPU that torch cannot use{need}: {_cause(torch, driver)}{error}. {_remedy(torch, driver)}; "
        "or --set engine.device=cpu to serve from the CPU"
    )


def missing_toolchain(
    *,
    environment: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
    has_module: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
    include: Path | None = None,
) -> str:
    """Return what the GPU kernels lack on this host; "" if nothing, or with COHORT_KERNELS=reference. Triton translates
    kernels at first use and builds a small C library to start them: that takes a C compiler and Python's headers."""
    if environment.get("COHORT_KERNELS") == "reference":
        return ""
    anyway = "or COHORT_KERNELS=reference to compute by PyTorch's operators, many times slower"
    if not has_module("triton"):
        return f"no Triton for the GPU kernels: install the one that this torch was built for (scripts/setup); {anyway}"
    compiler = environment.get("CC", "")
    if not (which(compiler) if compiler else which("gcc") or which("clang") or which("cc")):
        named = f"CC={compiler} is no program" if compiler else "none of gcc, clang, cc is on the path"
        return f"no C compiler for the GPU kernels ({named}): install gcc, or name one with CC; {anyway}"
    headers = include or Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        return (
            f"no {headers}/Python.h for the GPU kernels: install this Python's headers (on Debian and Ubuntu: "
            f"python3-dev); {anyway}"
        )
    return ""


def family_for(driver: str) -> str:
    """Return the newest wheel family that this driver runs; "" for none, or a version that cannot be read."""
    version = _parsed(driver)
    return next((family for family, least in DRIVER_FOR_FAMILY.items() if version >= least), "")


def _cause(torch: TorchFacts, driver: str) -> str:
    found = f"driver {driver}" if driver else "an NVIDIA driver of unknown version"
    if not torch.cuda:
        return f"{found} is here, but torch {torch.version} is a build for the CPU"
    least = _least(torch.cuda)
    built = f"torch {torch.version} is a build for CUDA {torch.cuda}"
    if driver and least and _parsed(driver) < least:
        return f"{built}, which needs driver {_text(least)} or later; this host has {driver}"
    return f"{built} and {found} would do, but no device answers: is the GPU handed to this process or container?"


def _remedy(torch: TorchFacts, driver: str) -> str:
    family = family_for(driver)
    least = _least(torch.cuda) if torch.cuda else ()
    if torch.cuda and not (driver and least and _parsed(driver) < least):
        return "Look at what `nvidia-smi` says here, and into docs/guide/gpu.md"
    update = f", or update the driver to {_text(least)}" if least else ""
    if not family:
        return (
            f"No build of this torch runs with that driver: update it to {_text(DRIVER_FOR_FAMILY['cu126'])} or later"
        )
    return (
        f"Install a build for it (remove torch and triton, then COHORT_ACCELERATOR=cuda COHORT_CUDA={family} "
        f"scripts/setup; docs/guide/gpu.md){update}"
    )


def _least(cuda: str) -> tuple[int, ...]:
    major = cuda.partition(".")[0]
    return _DRIVER_FOR_CUDA_MAJOR.get(int(major), ()) if major.isdigit() else ()


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _text(version: tuple[int, ...]) -> str:
    """Format a version as NVIDIA does, with two digits in the third part: 580.65.06."""
    return ".".join(str(part) if place < 2 else f"{part:02}" for place, part in enumerate(version))
