"""`cohort bench overhead`: the pipeline's cost. The same workload over HTTP and against the same engine in
process.

    cohort bench overhead --url http://127.0.0.1:8000 --config ~/.cache/cohort/run/8000/resolved.yaml

Start a pipeline first (`--preset unified`), with the threads named here. The two take turns A B A B; one engine works
at a time, the other is idle meanwhile. Prints medians over the rounds of the rounds' own differences: the time that the
pipeline adds to the first token, and the share it keeps of output tokens a second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from cohort.common.errors import ConfigError
from cohort.services.bench.child import MeasurementFailed
from cohort.services.bench.live.pipelines import Served
from cohort.services.bench.live.spec import ClientCommand
from cohort.services.bench.output import check_writable, publish_json
from cohort.services.bench.spread import Spread, spread


class Round(msgspec.Struct, frozen=True):
    """TTFT p50 in milliseconds and output tokens a second, both ways."""

    http_ttft_ms: float
    http_tokens_per_s: float
    direct_ttft_ms: float
    direct_tokens_per_s: float


class Overhead(msgspec.Struct, frozen=True):
    """The document behind `--json`."""

    concurrency: int
    added_ttft_ms: Spread
    kept_throughput: Spread
    rounds: list[Round]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the running pipeline")
    parser.add_argument("--config", type=Path, required=True, help="the configuration that pipeline runs")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of the engine in process")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="every round and the summary")


def run(args: argparse.Namespace) -> int:
    """Everything from parsed options. Raises `CohortError`."""
    if args.rounds < 1:
        raise ConfigError("--rounds must be above 0")
    check_writable(args.json, "--json")
    rounds = []
    for number in range(args.rounds):
        rounds.append(_round(args, number))
        told = rounds[-1]
        sys.stderr.write(
            f"round {number + 1}: HTTP {told.http_ttft_ms:.1f} ms, {told.http_tokens_per_s:.1f} tok/s; "
            f"in process {told.direct_ttft_ms:.1f} ms, {told.direct_tokens_per_s:.1f} tok/s\n"
        )
    found = summarise(args.concurrency, rounds)
    sys.stdout.write(
        f"concurrency {args.concurrency}: the pipeline adds {found.added_ttft_ms.median:.2f} ms to TTFT p50 and keeps "
        f"{found.kept_throughput.median:.3f} of the throughput (medians of {args.rounds} rounds)\n"
    )
    if args.json:
        publish_json(str(args.json), msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return 0


def summarise(concurrency: int, rounds: list[Round]) -> Overhead:
    """Differences and ratios within each round: other load on the machine hit both."""
    added = [each.http_ttft_ms - each.direct_ttft_ms for each in rounds]
    kept = [each.http_tokens_per_s / each.direct_tokens_per_s for each in rounds]
    return Overhead(concurrency, spread(added), spread(kept), rounds)


def _round(args: argparse.Namespace, seed: int) -> Round:
    lengths = (f"--input-len={args.input_len}", f"--output-len={args.output_len}", f"--seed={seed}")
    load = (f"--concurrency={args.concurrency}", f"--num-requests={args.requests}", "--warmup=1", *lengths)
    overall = Served(args.url, "").load([ClientCommand("client", load, 0.0)])["client"].overall
    direct = _in_process(args, lengths)
    return Round(
        overall["ttft_ms"]["p50"],
        overall["output_tokens_per_s"],
        1000 * direct["ttft_p50_s"],
        direct["output_tokens_per_s"],
    )


def _in_process(args: argparse.Namespace, lengths: tuple[str, ...]) -> dict[str, Any]:
    """A process of its own every time: torch stays out of this one, and the engine's cores are free meanwhile."""
    loop = (f"--threads={args.threads}", f"--concurrency={args.concurrency}", f"--requests={args.requests}")
    command = ["cohort.services.bench", "in-process", "--config", str(args.config), *loop, *lengths]
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise MeasurementFailed(f"the engine in process ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return found
