"""`cohort profile`: measure this machine, and with `--save` make a device and a cluster of it for the simulator.

    cohort profile --save here            → cohort simulate --cluster here …, advise, compare
    cohort profile --output points.json   the engine's points alone (`engine.profile`)

Starts a process that loads the model as a worker does (this one never loads torch), then a pipeline of one worker for
what the services take around a step. Prints the target forward size (E1) and the error that remains.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cohort.common.config import Config, dump_config, load_config
from cohort.common.devices.cores import usable_cores
from cohort.common.devices.inventory import this_machine
from cohort.common.errors import ConfigError
from cohort.common.hub.model_source import located
from cohort.common.policies.ecoserve.forward_size import target_forward_tokens
from cohort.common.policies.step_times.profile_table import ProfilePoint

if TYPE_CHECKING:
    from cohort.services.bench.fit.live_cycles import Phase, Slice
    from cohort.services.cli.machine_files import Measured

_ENGINE_S = 30.0
"""No round of the engine's points begins later: on two cores the whole command then ends within two minutes."""
_LIVE_S = 1.2
"""Time for each number of users."""
_TOGETHER_S = 30.0
"""Time of concurrent workers: for some seconds they get in each other's way, for others not."""

EPILOG = """\
examples:
  cohort profile --save here
  cohort simulate --cluster here --model smollm2-135m --trace 512x64 --rate 2 --count 100
  cohort profile --save node7 --model ~/models/Qwen2.5-7B-Instruct --to ~/shared/profiles

Names of shipped devices and clusters cannot be taken. Leave the machine alone meanwhile: what else runs is measured."""


class _Profile(msgspec.Struct, frozen=True):
    """The part of the file that is read here."""

    points: list[ProfilePoint]
    machine: str = ""
    device: str = ""
    model_folder: str = ""
    model_shape: dict[str, Any] = {}
    memory_bytes: int = 0
    units: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", default="", metavar="NAME", help="make a device and a cluster of this name")
    parser.add_argument("--to", metavar="DIR", help="write them there, not where --cluster finds them by name")
    parser.add_argument("--output", metavar="FILE", help="where the points go, as JSON")
    parser.add_argument(
        "--model", default="", help="its folder, or id in Hugging Face's cache (default: the default model)"
    )
    parser.add_argument("--model-name", default="", help="its shape in configs/models (default: the folder's name)")
    parser.add_argument("--instances", type=int, default=0, metavar="N", help="workers (default: 1 on a GPU, else 2)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of one (default: their share of the cores)")
    parser.add_argument("--repeats", type=int, default=5, help="steps per point; the median counts")
    parser.add_argument("--max-context", type=int, default=2048, help="longest context measured, in tokens")
    parser.add_argument("--engine-only", action="store_true", help="leave out the services: no pipeline is started")
    parser.add_argument("--config", action="append", default=[], metavar="FILE")


def run(args: argparse.Namespace) -> int:
    if not args.save and not args.output:
        raise ConfigError("--save NAME makes a device and a cluster, --output FILE keeps the points: give one of them")
    if args.to and not args.save:
        raise ConfigError("--to says where --save writes: give --save NAME")
    if min(args.repeats, args.max_context) < 1 or min(args.threads, args.instances) < 0:
        raise ConfigError("--repeats and --max-context must be above 0, --threads and --instances not below")
    if args.save:
        from cohort.services.simulator.hardware.data_files import check_name

        check_name(args.save)
        _check_fits()
    overrides = {"model": {"path": args.model}} if args.model else None
    config = located(load_config([Path(file) for file in args.config], overrides=overrides, machine=this_machine))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(args.output) if args.output else Path(folder) / "points.json"
        if code := run_engine(
            config,
            output,
            threads=_threads(args, config),
            repeats=args.repeats,
            max_context=args.max_context,
            model_name=args.model_name or (Path(args.model).name.lower() if args.model else "smollm2-135m"),
            budget_s=_ENGINE_S if args.save else float("inf"),
        ):
            return code
        tokens = forward_size(output)
        sys.stdout.write(f"target forward size: {tokens} tokens (engine.target_forward_tokens={tokens})\n")
        return save(args, config, output) if args.save else 0


def _check_fits() -> None:
    try:
        import scipy  # noqa: F401
    except ImportError as error:
        raise ConfigError("--save needs SciPy to fit: pip install 'cohort-serve[predictor]'") from error


def run_engine(
    config: Config,
    output: Path,
    *,
    threads: int,
    repeats: int,
    max_context: int,
    model_name: str,
    budget_s: float = float("inf"),
) -> int:
    """Write the points to `output`. Return the exit status of the process, which prints what was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        merged = Path(folder) / "config.yaml"
        merged.write_text(dump_config(config), encoding="utf-8")
        options = {
            "config": merged,
            "threads": threads,
            "repeats": repeats,
            "max-context": max_context,
            "budget": budget_s,
            "model-name": model_name,
            "output": output.absolute(),
        }
        command = [sys.executable, "-P", "-m", "cohort.common.engine.worker.profile_process"]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        return subprocess.run(command, check=False).returncode


def _threads(args: argparse.Namespace, config: Config) -> int:
    if args.threads or not args.save:
        return int(args.threads or config.default_threads(usable_cores()))
    return max(1, usable_cores() // _instances(args, gpu=False))


def _instances(args: argparse.Namespace, *, gpu: bool) -> int:
    return int(args.instances or (1 if gpu else min(2, usable_cores())))


def save(args: argparse.Namespace, config: Config, output: Path) -> int:
    """Write the files of a profile that lies in `output`."""
    from cohort.services.bench.fit.machine import fit_machine, profile_points
    from cohort.services.cli import machine_files
    from cohort.services.simulator.hardware.data_files import user_folder

    profile = msgspec.json.decode(output.read_bytes(), type=_Profile)
    gpu = profile.device.startswith("cuda")
    model, new_model = machine_files.model_of(profile.model_shape)
    measured = machine_files.Measured(
        name=args.save,
        gpu=gpu,
        memory_bytes=profile.memory_bytes,
        units=profile.units,
        instances=_instances(args, gpu=gpu),
        threads=_threads(args, config),
        cores=usable_cores(),
        model=model,
        model_folder=Path(profile.model_folder),
        machine=f"{platform.node()} ({profile.machine}, {profile.device})",
        measured_on=time.strftime("%Y-%m-%d"),
    )
    phases = [] if args.engine_only else live(measured.threads, args, config)
    slices = [] if args.engine_only or not measured.shares_cores else live_together(measured, config)
    points = profile_points(output)
    machine = fit_machine(points, model, machine_files.template(measured), phases, slices, measured.cores)
    folder = Path(args.to).expanduser() if args.to else user_folder()
    written = machine_files.write(folder, measured, machine, new_model=new_model)
    cycles = sum(len(phase.cycles) for phase in phases)
    lines = [f"{len(points)} points of the engine, {cycles} cycles of a live worker; error on what was held out:"]
    lines += [f"  {line}" for line in machine_files.error_lines(machine)]
    if phases:
        lines.append(
            f"around a step: {1e3 * machine.stack.step_s:.2f} ms and {1e3 * machine.stack.row_s:.3f} ms a row; other "
            f"processes: {1e3 * machine.service_step_s:.2f} and {1e3 * machine.service_row_s:.3f} ms of a core; "
            f"decodes scatter by {machine.scatter:.0%}, {machine.scatter_lasting:.0%} of the variance for a while"
        )
        if machine.scatter_prompts is not None:
            lines[-1] += f", an iteration with prompts of a second by {machine.scatter_prompts:.1%}"
    lines += filter(None, [machine_files.contention_line(machine)])
    lines += filter(None, [machine_files.disturbed(machine)])
    lines += [f"wrote {path}" for path in written]
    cluster = next(str(path) for path in written if path.parent.name == "clusters") if args.to else args.save
    shown = next((str(path) for path in written if args.to and path.parent.name == "models"), model.name)
    lines.append(f"  cohort simulate --cluster {cluster} --model {shown} --trace 512x64 --rate 1 --count 100")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def live(threads: int, args: argparse.Namespace, config: Config) -> list[Phase]:
    """Measure a pipeline of one worker. Raises `MeasurementFailed`."""
    from cohort.services.bench.fit.live_cycles import measure_live

    sys.stderr.write("a pipeline of one worker, asked by 1, 4 and 8 users\n")
    return measure_live(_overlay(threads, config), _LIVE_S)


def live_together(measured: Measured, config: Config) -> list[Slice]:
    """Measure workers of this machine alone and together. Raises `MeasurementFailed`."""
    from cohort.services.bench.fit.live_cycles import measure_together

    sys.stderr.write(f"a pipeline of {measured.instances} workers, {2 * measured.instances} users come and go\n")
    return measure_together(_overlay(measured.threads, config), measured.instances, _TOGETHER_S)


def _overlay(threads: int, config: Config) -> dict[str, Any]:
    from cohort.services.bench.live.pipelines import UNLEARNED

    overlay: dict[str, Any] = {"engine": {"threads": threads, "device": config.engine.device}}
    overlay["speculation"] = {"mode": "off"}  # a step is to yield one token of a row
    overlay["predictor"] = dict(UNLEARNED)
    if config.model.path:
        overlay["model"] = {"path": config.model.path}
    return overlay


def forward_size(file: Path) -> int:
    """E1 · Return the target forward size, from prompts computed from their first token on: no context slows them."""
    profile = msgspec.json.decode(file.read_bytes(), type=_Profile)
    return target_forward_tokens(
        (point.shape.tokens_per_row, point.median_s)
        for point in profile.points
        if point.shape.rows == 1 and point.shape.tokens_per_row == point.shape.context and not point.shape.decodes
    )
