"""`cohort bench token-cost`: processor time per streamed token of gateway, worker loop, bus and manager.

    cohort bench token-cost --streams 64 256 1024 --tokens-per-s 4000

The real processes, the real bus and real streams over HTTP, around an engine that samples at once and for nothing; a
step lasts as long as the rate asks for, asleep. Times are of processors, not of clocks on the wall, so other programs
on the machine disturb them little; a rate beyond what the machine can do shows as a lower rate.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

import msgspec

from cohort.common.errors import ConfigError
from cohort.services.bench.output import cells, check_output, markdown_table, publish_json
from cohort.services.bench.tokens.measuring import Load, measure

_COLUMNS = {
    "streams": "{0.streams}",
    "tokens/s": "{0.tokens_per_s:.0f}",
    "tokens/read": "{0.tokens_per_read:.2f}",
    "gateway": "{0.gateway_us:.1f}",
    "worker loop": "{0.worker_us:.1f}",
    "bus": "{0.bus_us:.1f}",
    "together, µs": "{0.path_us:.1f}",
    "manager": "{0.manager_us:.1f}",
    "free engine": "{0.engine_us:.1f}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1024], help="at once, one after the other")
    parser.add_argument("--tokens-per-s", type=float, default=4000.0, help="of all streams together")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured, once all streams run")
    parser.add_argument("--rounds", type=int, default=1, help="of each; all are shown")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gateways", type=int, default=1, help="on one port")
    parser.add_argument(
        "--resumable", action="store_true", help="streams that can be gone on with after a lost connection"
    )
    parser.add_argument("--preset", default="unified", help="whose policies")
    parser.add_argument(
        "--model", default="", help="whose tokenizer is used: folder, or id; default: the default model"
    )
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="SECTION.OPTION=VALUE")
    parser.add_argument("--json", metavar="FILE", help="every measurement ('-': to stdout, instead of the table)")


def run(args: argparse.Namespace) -> int:
    """Run the command with parsed options. Raises `CohortError`."""
    if min(*args.streams, args.rounds, args.workers, args.gateways) < 1 or min(args.tokens_per_s, args.seconds) <= 0:
        raise ConfigError("--streams, --tokens-per-s, --seconds, --rounds, --workers and --gateways must be above 0")
    check_output(args)
    found = [
        measure(
            args.preset,
            args.settings,
            args.model,
            Load(streams, args.tokens_per_s, args.seconds, args.workers, args.gateways, args.resumable),
        )
        for _ in range(args.rounds)
        for streams in args.streams
    ]
    publish_json(args.json, msgspec.json.format(msgspec.json.encode([asdict(cost) for cost in found])))
    if args.json != "-":
        sys.stdout.write(markdown_table(["streams"], list(_COLUMNS)[1:], cells(found, _COLUMNS)))
    return 0
