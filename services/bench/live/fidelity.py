"""`cohort bench fidelity`: the live pipeline beside its simulation, on the device that was profiled.

Starts and stops pipelines itself (`cohort serve --detach`), so nothing else should run. For every arrangement (two
unified workers; a prefill and a decode worker; the default preset's two; one CPU thread each) and every rate:
`--requests` requests whose lengths are the trace's times `--scale`, Poisson arrivals, greedy, outputs of exactly the
trace's length. The same file of arrivals and lengths then goes through `cohort simulate`. What no simulation has is off
in both: drafts, cached prefixes, and the length predictor's learning.

Prints, live and simulated: mean and p90 TPOT, mean, p50 and p99 TTFT, output tokens a second; and the error of each. Of
several `--runs` live, of several `--seeds` by which simulated iterations scatter, and of several clusters, it takes the
median of every number, and shows the lowest and the highest. Where a machine's speed moves, profile it before and after
the live runs and name both: `--reuse runs.json --cluster before after`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import yaml

from cohort.common.errors import ConfigError
from cohort.common.workloads.traces import read_trace
from cohort.services.bench.live.pipelines import UNLEARNED, cohort, pipeline
from cohort.services.bench.live.spec import ClientCommand
from cohort.services.bench.output import check_writable, markdown_table, publish_json

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--trace", type=Path, required=True, help="lengths: any format `cohort bench --trace` reads")
    parser.add_argument("--arrangements", nargs="+", default=list(ARRANGEMENTS), choices=list(ARRANGEMENTS))
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 3.0], help="requests a second")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--scale", type=float, default=0.125, help="factor on the trace's lengths")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a prompt or an output at most")
    parser.add_argument("--predictor", default="none", help="of the simulation (default: none)")
    parser.add_argument(
        "--cluster", nargs="+", default=["cpu-2x1"], help="device and count of the simulation; several: on each"
    )
    parser.add_argument("--runs", type=int, default=1, help="live ones, the arrangements in turn")
    parser.add_argument("--seeds", type=int, default=5, help="simulations, each with other slow and fast iterations")
    parser.add_argument("--record", type=Path, help="folder for recordings of the live workers")
    parser.add_argument("--json", type=Path, help="write every number")
    parser.add_argument("--reuse", type=Path, help="live numbers of an earlier --json; only the simulation runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8320)


def run(args: argparse.Namespace) -> int:
    """Everything from parsed options. Raises `CohortError`."""
    check_writable(args.json, "--json")
    if min(args.runs, args.seeds) < 1:
        raise ConfigError("--runs, --seeds: at least one")
    live = _earlier(args.reuse) if args.reuse else {}
    found: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rate in args.rates:
            trace = folder / "trace.csv"
            write_trace(args.trace, trace, args, rate)
            for turn in range(args.runs):
                for arrangement in args.arrangements:
                    runs = live.setdefault((arrangement, rate), [])
                    if len(runs) <= turn:
                        runs.append(_live(args, arrangement, trace))
                        told = ", ".join(f"{value:.1f}" for value in runs[-1])
                        sys.stderr.write(f"{arrangement}, {rate:g}, live run {turn + 1} of {args.runs}: {told}\n")
            for arrangement in args.arrangements:
                runs = live[arrangement, rate]
                places = [(cluster, seed) for cluster in args.cluster for seed in range(args.seeds)]
                virtual = [_simulated(args, arrangement, trace, folder, *place) for place in places]
                middle = [median(values) for values in zip(*virtual, strict=True)]
                one = {"arrangement": arrangement, "rate": rate, "live": runs, "simulated": middle}
                found.append({**one, "simulations": virtual})
                numbers = zip(zip(*runs, strict=True), zip(*virtual, strict=True), strict=True)
                cells = [_cell(of_runs, of_seeds) for of_runs, of_seeds in numbers]
                rows.append([f"{arrangement}, {rate:g}", *cells])
                sys.stderr.write(f"{' | '.join(rows[-1])}\n")
                if args.json:
                    publish_json(str(args.json), json.dumps(found, indent=1).encode())
    titles = [f"{name}: live, simulated, error" for name in COLUMNS]
    sys.stdout.write(markdown_table(["arrangement, requests/s"], titles, rows))
    return 0


def _cell(live: tuple[float, ...], simulated: tuple[float, ...]) -> str:
    return f"{_spread(live)}, {_spread(simulated)}, {median(simulated) / median(live) - 1:+.1%}"


def _spread(values: tuple[float, ...]) -> str:
    several = f" ({min(values):.1f} to {max(values):.1f})" if len(set(values)) > 1 else ""
    return f"{median(values):.1f}{several}"


def _earlier(path: Path) -> dict[tuple[str, float], list[tuple[float, ...]]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {(each["arrangement"], each["rate"]): [tuple(run) for run in each["live"]] for each in found}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--reuse {path}: {error}") from error


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
    over |= {"speculation": {"mode": "off"}, "predictor": dict(UNLEARNED)}
    options = (f"--trace={trace}", "--time-scale=1", "--warmup=4", f"--seed={args.seed}")
    with pipeline(preset, over, args.port) as served:
        return _columns(served.load([ClientCommand("client", options, 0.0)])["client"].overall)


def _simulated(
    args: argparse.Namespace, arrangement: str, trace: Path, folder: Path, on: str, seed: int
) -> tuple[float, ...]:
    preset, workers, roles = ARRANGEMENTS[arrangement]
    config, report = folder / "simulated.yaml", folder / "simulated.json"
    config.write_text(yaml.safe_dump({"workers": workers, "kv": _WITHOUT_PREFIXES}))
    cluster = ("--cluster", on, "--model", "smollm2-135m", "--roles", roles, "--predictor", args.predictor)
    given = ("--trace", str(trace), "--preset", preset, "--config", str(config))
    cohort("simulate", *given, *cluster, "--seed", str(seed), "--json", str(report))
    return _columns(json.loads(report.read_text())[0]["overall"])


def _columns(overall: dict[str, Any]) -> tuple[float, ...]:
    """Live and simulated reports have the same names."""
    tpot, ttft = overall["tpot_ms"], overall["ttft_ms"]
    return tpot["mean"], tpot["p90"], ttft["mean"], ttft["p50"], ttft["p99"], overall["output_tokens_per_s"]
