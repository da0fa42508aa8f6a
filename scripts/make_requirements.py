"""Writes scripts/requirements/: every package a set-up installs, by version and SHA-256, from pyproject.toml's ranges.

    serve.txt    what serving needs                      ┐ versions and hashes of all files of each release:
    dev.txt      what checks and tests need besides      │ installed with --require-hashes --no-deps, so nothing
    ucx12.txt    UCX for CUDA 12                         │ else and nothing different gets in, whatever index is
    ucx13.txt    UCX for CUDA 13                         │ configured
    otel.txt     OpenTelemetry, for traces               │
    ray.txt      Ray, for a cluster's nodes              ┘
    torch.txt    PyTorch and Triton: versions, no hashes

PyTorch comes in variants (CPU, CUDA 12, CUDA 13 …) with one version and different bytes, from indexes that the
operator chooses: it is pinned by version alone, and its CUDA libraries are what its own metadata demands exactly.

`python scripts/make_requirements.py` needs `uv` (`pip install uv`) and a package index; it keeps the versions that are
there and fit, `--upgrade` takes the newest. No index is named in the files. Called by people after a change of
pyproject.toml's dependencies; that the files satisfy pyproject.toml is a test
(tests/security/deployment/test_supply_chain.py).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "scripts" / "requirements"
PYTHONS = ("3.11", "3.12")
PLATFORM = "x86_64-unknown-linux-gnu"  # decides markers; the hashes are those of every platform's files
SERVE_EXTRAS = ("engine", "predictor")

# Packages that differ between accelerators: pinned by version where pyproject.toml names it, else by PyTorch itself.
ACCELERATOR = re.compile(r"torch|triton|cuda-.*|nvidia-(?!ml-py).*")
# UCX's own use of CUDA's bindings is the same bytes whatever PyTorch is beside it.
CUDA_BINDINGS = re.compile(r"cuda-(bindings|core|pathfinder)")
# A tool of the virtual environment, not a dependency: each environment brings its own.
NOT_OURS = frozenset({"pip"})

HEAD = """\
# {purpose}
# Made by scripts/make_requirements.py from pyproject.toml; installed by scripts/setup. Do not edit.
"""
PURPOSES = {
    "serve": "What serving needs: versions and hashes.",
    "dev": "What checks and tests need besides serve.txt: versions and hashes.",
    "ucx12": "UCX for CUDA 12, besides serve.txt: versions and hashes.",
    "ucx13": "UCX for CUDA 13, besides serve.txt: versions and hashes.",
    "otel": "OpenTelemetry's SDK and exporter, besides serve.txt: versions and hashes.",
    "ray": "Ray, besides serve.txt: versions and hashes.",
    "torch": "PyTorch and what depends on its variant: versions alone, because the variants' bytes differ.",
}


@dataclass(frozen=True)
class Pin:
    """One version for some Pythons, and the SHA-256 of every file of that release."""

    version: str
    hashes: tuple[str, ...]
    pythons: tuple[str, ...]

    def line(self, name: str, *, hashes: bool) -> str:
        marker = "" if self.pythons == PYTHONS else f' ; python_version == "{self.pythons[0]}"'
        return " \\\n    ".join([f"{name}=={self.version}{marker}", *(self.hashes if hashes else ())]) + "\n"


Pins = dict[str, list[Pin]]


def resolve(extras: Sequence[str], constraints: Pins, *, upgrade: bool = False, without_torch: bool = False) -> Pins:
    """Resolve the requirements of pyproject.toml with these extras on Linux, for each supported Python."""
    pins: Pins = {}
    for python in PYTHONS:
        text = compiled(extras, lines(constraints, python), python, upgrade=upgrade, without_torch=without_torch)
        for name, [pin] in parse(text, (python,)).items():
            others = pins.setdefault(name, [])
            if others and others[0].version == pin.version:
                pin = Pin(pin.version, pin.hashes, (*others.pop().pythons, python))
            others.append(pin)
    return dict(sorted(pins.items()))


def compiled(extras: Sequence[str], constraints: str, python: str, *, upgrade: bool, without_torch: bool) -> str:
    command = ["uv", "pip", "compile", str(ROOT / "pyproject.toml"), "--generate-hashes", "--quiet"]
    command += ["--python-version", python, "--python-platform", PLATFORM, "--no-annotate", "--no-header"]
    command += ["--upgrade"] if upgrade else []
    command += [f"--extra={extra}" for extra in extras]
    with tempfile.TemporaryDirectory() as work:
        bounds, dropped = Path(work) / "constraints.txt", Path(work) / "override.txt"
        bounds.write_text(constraints, encoding="utf-8")
        dropped.write_text("torch ; python_version < '0'\n", encoding="utf-8")
        command += ["--constraint", str(bounds)]
        command += ["--override", str(dropped)] if without_torch else []
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def parse(text: str, pythons: tuple[str, ...] = PYTHONS) -> Pins:
    """Parse a requirements file of ours, or of uv for one Python."""
    pins: Pins = {}
    for block in re.split(r"\n(?=\S)", text.strip()):
        if found := re.match(r"([\w.-]+)==([^\s;\\]+)(?: ; python_version == \"([\d.]+)\")?", block):
            name, version, python = found.groups()
            hashes = tuple(re.findall(r"--hash=sha256:[0-9a-f]{64}", block))
            pins.setdefault(name, []).append(Pin(version, hashes, (python,) if python else pythons))
    return pins


def lines(pins: Pins, python: str) -> str:
    """Return the pins of one Python as constraints."""
    return "".join(f"{name}=={pin.version}\n" for name, some in pins.items() for pin in some if python in pin.pythons)


def write(name: str, pins: Pins, *, hashes: bool = True) -> None:
    text = "".join(pin.line(package, hashes=hashes) for package, some in pins.items() for pin in some)
    (FOLDER / f"{name}.txt").write_text(HEAD.format(purpose=PURPOSES[name]) + text, encoding="utf-8")
    sys.stdout.write(f"{name}.txt: {len(pins)} packages\n")


def read(name: str) -> Pins:
    file = FOLDER / f"{name}.txt"
    return parse(file.read_text(encoding="utf-8")) if file.is_file() else {}


def without(pins: Pins, *known: Pins, wanted: re.Pattern[str] | None = None) -> Pins:
    excluded = NOT_OURS.union(*known)
    return {
        name: some
        for name, some in pins.items()
        if name not in excluded and (not ACCELERATOR.fullmatch(name) or (wanted and wanted.fullmatch(name)))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Write scripts/requirements/ anew from pyproject.toml.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions; default: keep what fits")
    parser.add_argument("--torch", metavar="VERSION", help="PyTorch's version; default: the one in torch.txt")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    torch = [Pin(options.torch, (), PYTHONS)] if options.torch else read("torch")["torch"]
    old = {} if options.upgrade else {**read("serve"), **read("dev")}
    every = resolve((*SERVE_EXTRAS, "dev"), {**old, "torch": torch}, upgrade=options.upgrade)
    serve = without(resolve(SERVE_EXTRAS, every))
    write("serve", serve)
    write("dev", without(every, serve))
    for extra in ("otel", "ray"):
        write(extra, without(resolve((extra,), every), serve))
    write("torch", {name: every[name] for name in ("torch", "triton")}, hashes=False)
    for cuda, extras in (("ucx12", ["ucx12"]), ("ucx13", ["engine", "ucx13"])):
        # PyTorch for CUDA 13 shares CUDA's bindings with UCX, so one version has to suit both.
        fixed = {**without(every), **({} if options.upgrade else read(cuda)), "torch": torch}
        ucx = resolve(extras, fixed, without_torch=cuda == "ucx12")
        write(cuda, without(ucx, serve, wanted=CUDA_BINDINGS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
