"""`cohort bench token-cost`: processor time per streamed token, and per short request, beside a bare aiohttp server.

    cohort bench token-cost --streams 64 256 1024 --tokens-per-s 4000 --users 64

The real processes, the real bus and real streams over HTTP, around an engine that samples at once and for nothing; a
step lasts as long as the rate asks for, asleep. Times are of processors, not of clocks on the wall, so other programs
on the machine disturb them less; a rate beyond what the machine can do shows as a lower rate. Requests a second are by
the wall, on all processors: they need a quiet machine. The bare server sends the same bytes; "socket's write" is what
the kernel takes for them alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import msgspec

from cohort.common.errors import ConfigError
from cohort.services.bench.output import cells, check_output, markdown_table, publish_json
from cohort.services.bench.tokens.measuring import Load, measure, measure_requests

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
    "bare aiohttp": "{0.bare_us:.1f}",
    "gateway over it": "{0.over_bare:.2f}",
    "socket's write": "{0.write_us:.1f}",
}
_REQUEST_COLUMNS = {
    "users": "{0.users}",
    "requests/s": "{0.requests_per_s:.0f}",
    "gateway, µs": "{0.gateway_us:.0f}",
    "other processes": "{0.others_us:.0f}",
    "bare aiohttp, requests/s": "{0.bare_per_s:.0f}",
    "µs": "{0.bare_us:.0f}",
    "over it": "{0.over_bare:.2f}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 256, 1024], help="at once, one after the other")
    parser.add_argument(
        "--users", type=int, nargs="*", default=[64], help="at once, for short requests over an engine without a pause"
    )
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
    least = min(*args.streams, *args.users, args.rounds, args.workers, args.gateways, args.tokens_per_s, args.seconds)
    if least <= 0:
        raise ConfigError("all numbers must be above 0")
    check_output(args)
    setup = args.preset, args.settings, args.model
    found = [
        measure(*setup, Load(streams, args.tokens_per_s, args.seconds, args.workers, args.gateways, args.resumable))
        for _ in range(args.rounds)
        for streams in args.streams
    ]
    requests = [measure_requests(*setup, users, args.seconds) for _ in range(args.rounds) for users in args.users]
    result = {"streams": [asdict(cost) for cost in found], "requests": [asdict(cost) for cost in requests]}
    publish_json(args.json, msgspec.json.format(msgspec.json.encode(result)))
    if args.json != "-":
        tables = [_table(found, _COLUMNS)] if found else []
        tables += [_table(requests, _REQUEST_COLUMNS)] if requests else []
        sys.stdout.write("\n".join(tables))
    return 0


def _table(costs: Sequence[object], columns: Mapping[str, str]) -> str:
    first, *others = columns
    return markdown_table([first], others, cells(costs, columns))
