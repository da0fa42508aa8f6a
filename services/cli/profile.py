"""`cohort profile`: measure this machine's engine, for the simulator's cost model.

Starts a process that loads the model as a worker does (this one never loads torch), and waits for its file of points.
`cohort bench fit cost-model profile FILE` makes a device of it. Prints the target forward size (E1) of what was
measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from cohort.common.config import dump_config, load_config
from cohort.common.devices.inventory import this_machine
from cohort.common.policies.ecoserve.forward_size import target_forward_tokens


class _Shape(msgspec.Struct, frozen=True):
    rows: int
    tokens_per_row: int
    context: int


class _Point(msgspec.Struct, frozen=True):
    shape: _Shape
    median_s: float


class _Profile(msgspec.Struct, frozen=True):
    """The part of the file that is read here."""

    points: list[_Point]


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser("profile", help="measure this machine's engine")
    parser.add_argument("--model", default="", help="folder of the model (default: the default model)")
    parser.add_argument("--model-name", default="smollm2-135m", help="its shape in configs/models")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: as a worker has)")
    parser.add_argument("--repeats", type=int, default=5, help="steps per point; the median counts")
    parser.add_argument("--max-context", type=int, default=2048, help="longest context measured, in tokens")
    parser.add_argument("--config", action="append", default=[], metavar="FILE")
    parser.add_argument("--output", required=True, metavar="FILE", help="where the points go, as JSON")


def run(args: argparse.Namespace) -> int:
    overrides = {"model": {"path": args.model}} if args.model else None
    config = load_config([Path(file) for file in args.config], overrides=overrides, machine=this_machine)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = args.threads or config.default_threads(cores)
    with tempfile.TemporaryDirectory() as folder:
        merged = Path(folder) / "config.yaml"
        merged.write_text(dump_config(config), encoding="utf-8")
        command = [
            sys.executable,
            "-P",
            "-m",
            "cohort.common.engine.profile_process",
            "--config",
            str(merged),
            "--threads",
            str(threads),
            "--repeats",
            str(args.repeats),
            "--max-context",
            str(args.max_context),
            "--model-name",
            args.model_name,
            "--output",
            str(Path(args.output).absolute()),
        ]
        code = subprocess.run(command, check=False).returncode
    if code == 0:
        tokens = forward_size(Path(args.output))
        sys.stdout.write(f"target forward size: {tokens} tokens (engine.target_forward_tokens={tokens})\n")
    return code


def forward_size(file: Path) -> int:
    """E1 · Of prompts that the profile computed from their first token on: no context of earlier chunks slows them."""
    profile = msgspec.json.decode(file.read_bytes(), type=_Profile)
    return target_forward_tokens(
        (point.shape.tokens_per_row, point.median_s)
        for point in profile.points
        if point.shape.rows == 1 and point.shape.tokens_per_row == point.shape.context
    )
