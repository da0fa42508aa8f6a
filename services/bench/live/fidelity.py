"""`cohort bench fidelity`: the live pipeline beside its simulation, on the device that was profiled.

Starts and stops pipelines itself (`cohort serve --detach`), so nothing else should run. For every arrangement (two
unified workers; a prefill and a decode worker; the default preset's two; one CPU thread each) and every rate:
`--requests` requests whose lengths are the trace's times `--scale`, Poisson arrivals, greedy, outputs of exactly the
trace's length. The same file of arrivals and lengths then goes through `cohort simulate`.

Before and after every live run the steps that a profile of this machine keeps for its check are measured again, by the
engine alone; the simulation of that run has the machine at the pace of those moments. (The speed of a shared machine
moves by a tenth within minutes. What the live run took has no part in it; `--pace 1` leaves it out, as do clusters
without a profile.)

Prints, live and simulated: mean and p90 TPOT, mean, p50 and p99 TTFT, output tokens a second; and the error of each. Of
several `--runs` it takes the median of every number, and shows the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

import msgspec
import yaml

from cohort.common.errors import ConfigError
from cohort.common.workloads.traces import read_trace
from cohort.services.bench.live.pipelines import cohort, pipeline
from cohort.services.bench.live.spec import ClientCommand
from cohort.services.bench.output import check_writable, markdown_table, publish_json
from cohort.services.simulator.hardware import load_cluster
from cohort.services.simulator.measuring import pace_now

ARRANGEMENTS: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "colocated": ("unified", [{"role": "unified", "count": 2, "threads": 1}], "unified=2"),
    "disaggregated": (
        "disaggregated",
        [{"role": "prefill", "threads": 1}, {"role": "decode", "threads": 1}],
        "prefill=1,decode=1",
    ),
    "cohort": ("cohort", [{"role": "prefill", "threads": 1}, {"role": "decode", "threads": 1}], "prefill=1,decode=1"),
}
COLUMNS = ("TPOT mean, ms", "TPOT p90, ms", "TTFT mean, ms", "TTFT p50, ms", "TTFT p99, ms", "output tokens/s")
_WITHOUT_PREFIXES = {"prefix_caching": False}


class Run(msgspec.Struct, frozen=True):
    """What a live run showed, and by what factor the engine's steps took longer around it than in the profile."""

    columns: tuple[float, ...]
    pace: float


class _Kept(msgspec.Struct, frozen=True):
    """An entry of `--json`."""

    arrangement: str
    rate: float
    live: Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--trace", type=Path, required=True, help="lengths: any format `cohort bench --trace` reads")
    parser.add_argument("--arrangements", nargs="+", default=list(ARRANGEMENTS), choices=list(ARRANGEMENTS))
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 3.0], help="requests a second")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--scale", type=float, default=0.125, help="factor on the trace's lengths")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a prompt or an output at most")
    parser.add_argument("--predictor", default="none", help="of the simulation (default: none)")
    parser.add_argument("--cluster", default="cpu-2x1", help="device and count of the simulation")
    parser.add_argument("--runs", type=int, default=1, help="live ones, the arrangements in turn")
    parser.add_argument("--record", type=Path, help="folder for recordings of the live workers")
    parser.add_argument("--json", type=Path, help="write every number")
    parser.add_argument("--reuse", type=Path, help="live numbers of an earlier --json; only the simulation runs")
    parser.add_argument(
        "--pace", type=float, help="of the machine in all simulations (default: measured beside each run)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8320)


def run(args: argparse.Namespace) -> int:
    """Everything from parsed options. Raises `CohortError`."""
    check_writable(args.json, "--json")
    if args.runs < 1:
        raise ConfigError("--runs: at least one")
    pace = _pace(args)
    live = _earlier(args.reuse) if args.reuse else {}
    found: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rate in args.rates:
            trace = folder / "trace.csv"
            write_trace(args.trace, trace, args, rate)
            before: float | None = None
            for turn in range(args.runs):
                for arrangement in args.arrangements:
                    runs = live.setdefault((arrangement, rate), [])
                    if len(runs) <= turn:
                        before = before or pace()
                        columns = _live(args, arrangement, trace)
                        after = pace()
                        runs.append(Run(columns, fmean((before, after))))
                        before = after
                        told = f"{', '.join(f'{value:.1f}' for value in columns)}; pace {runs[-1].pace:.3f}"
                        sys.stderr.write(f"{arrangement}, {rate:g}, live run {turn + 1} of {args.runs}: {told}\n")
            for arrangement in args.arrangements:
                runs = live[arrangement, rate]
                virtual = [_simulated(args, arrangement, trace, folder, each.pace) for each in runs]
                found += [
                    {"arrangement": arrangement, "rate": rate, "live": run, "simulated": columns}
                    for run, columns in zip(runs, virtual, strict=True)
                ]
                pairs = zip(zip(*(run.columns for run in runs), strict=True), zip(*virtual, strict=True), strict=True)
                rows.append([f"{arrangement}, {rate:g}", *(_cell(*pair) for pair in pairs)])
                sys.stderr.write(f"{' | '.join(rows[-1])}\n")
                if args.json:
                    publish_json(str(args.json), msgspec.json.format(msgspec.json.encode(found)))
    titles = [f"{name}: live, simulated, error" for name in COLUMNS]
    sys.stdout.write(markdown_table(["arrangement, requests/s"], titles, rows))
    return 0


def _pace(args: argparse.Namespace) -> Callable[[], float]:
    """Measures the machine's pace beside its profile, where there is one and nobody says it."""
    note = load_cluster(args.cluster).profile
    if args.pace is not None:
        return lambda: float(args.pace)
    return (lambda: 1.0) if note is None else (lambda: pace_now(args.cluster, note))


def _cell(live: Sequence[float], simulated: Sequence[float]) -> str:
    errors = [ours / theirs - 1.0 for theirs, ours in zip(live, simulated, strict=True)]
    spread = f" ({min(errors):+.1%} to {max(errors):+.1%})" if len(live) > 1 else ""
    return f"{median(live):.1f}, {median(simulated):.1f}, {median(errors):+.1%}{spread}"


def _earlier(path: Path) -> dict[tuple[str, float], list[Run]]:
    found: dict[tuple[str, float], list[Run]] = {}
    try:
        for each in msgspec.json.decode(path.read_bytes(), type=list[_Kept]):
            found.setdefault((each.arrangement, each.rate), []).append(each.live)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--reuse {path}: {error}") from error
    return found


def write_trace(source: Path, target: Path, args: argparse.Namespace, rate: float) -> None:
    """The requests of one rate: lengths scaled and bounded, arrivals drawn."""
    random, now_s = Random(args.seed), 0.0
    with target.open("w", encoding="utf-8") as out:
        out.write("arrival_s,prompt_tokens,output_tokens\n")
        for row in read_trace(source).rows[: args.requests]:
            prompt, output = (max(2, round(n * args.scale)) for n in (row.prompt_tokens, row.output_tokens))
            out.write(f"{now_s:.6f},{min(prompt, args.longest)},{min(output, args.longest)}\n")
            now_s += random.expovariate(rate)


def _live(args: argparse.Namespace, arrangement: str, trace: Path) -> tuple[float, ...]:
    preset, workers, _ = ARRANGEMENTS[arrangement]
    recording = {"folder": str(args.record)} if args.record else {}
    over = {"workers": workers, "kv": _WITHOUT_PREFIXES, "recording": recording}
    options = (f"--trace={trace}", "--time-scale=1", "--warmup=4", f"--seed={args.seed}")
    with pipeline(preset, over, args.port) as served:
        return _columns(served.load([ClientCommand("client", options, 0.0)])["client"].overall)


def _simulated(args: argparse.Namespace, arrangement: str, trace: Path, folder: Path, pace: float) -> tuple[float, ...]:
    preset, workers, roles = ARRANGEMENTS[arrangement]
    config, report = folder / "simulated.yaml", folder / "simulated.json"
    config.write_text(yaml.safe_dump({"workers": workers, "kv": _WITHOUT_PREFIXES}))
    machine = ("--cluster", args.cluster, f"--pace={pace}", "--predictor", args.predictor)
    served = ("--model", "smollm2-135m", "--roles", roles)
    given = ("--trace", str(trace), "--preset", preset, "--config", str(config))
    cohort("simulate", *given, *machine, *served, "--json", str(report))
    return _columns(json.loads(report.read_text())[0]["overall"])


def _columns(overall: dict[str, Any]) -> tuple[float, ...]:
    """Live and simulated reports have the same names."""
    tpot, ttft = overall["tpot_ms"], overall["ttft_ms"]
    return tpot["mean"], tpot["p90"], ttft["mean"], ttft["p50"], ttft["p99"], overall["output_tokens_per_s"]
