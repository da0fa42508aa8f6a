"""`cohort bench links`: the KV links between two processes of this machine, beside UCX's own measure.

Starts `measuring`, where the links are, and publishes its report as a table and JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cohort.common.errors import ConfigError
from cohort.services.bench.child import run_child, shown_on
from cohort.services.bench.engine.render import LINK_OVER_PERFTEST, Target, targets
from cohort.services.bench.links_measuring import LINKS, PERFTEST, ROUNDS, SIZES_MB, TOTAL_MB, LinkReport
from cohort.services.bench.output import add_output_arguments, check_output, output_console, plain_table, publish_json

_CHILD = "cohort.services.bench.links_measuring"
_QUICK_TOTAL_MB = 16
NAMES = {
    "ucx": "UCX link",
    "ucx-tcp": "UCX, TCP",
    "nixl": "NIXL link",
    "nixl-tcp": "NIXL, TCP",
    "zmq": "ZeroMQ link",
    "zmq-curve": "ZeroMQ, CURVE",
    PERFTEST: PERFTEST,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--links", nargs="+", choices=LINKS, default=LINKS, help="default: all")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="MB", help="message sizes in 2^20 bytes (1 4 16 64)")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"all run in turn (default {ROUNDS})")
    parser.add_argument("--total-mb", type=int, metavar="MB", help=f"moved in one measurement (default {TOTAL_MB})")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs")
    parser.add_argument("--through", default="", metavar="COMMAND", help="runs the other process: 'ip netns exec NAME'")
    parser.add_argument("--host", default="127.0.0.1", help="address at which ZeroMQ listens (default: %(default)s)")
    parser.add_argument("--net-devices", default="", metavar="LIST", help="of UCX, as UCX_NET_DEVICES")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Everything from parsed options; 1 where no link could be measured. Raises `CohortError`."""
    sizes = args.sizes or (SIZES_MB[:1] if args.quick else SIZES_MB)
    rounds = args.rounds if args.rounds is not None else 1 if args.quick else ROUNDS
    total_mb = args.total_mb if args.total_mb is not None else _QUICK_TOTAL_MB if args.quick else TOTAL_MB
    for option, value in (("--sizes", min(sizes)), ("--rounds", rounds), ("--total-mb", total_mb)):
        if value < 1:
            raise ConfigError(f"{option} must be above 0")
    check_output(args)
    quiet = args.quiet or args.json == "-"
    report_to = shown_on(Console(stderr=True, quiet=quiet))
    wanted = {"through": args.through, "host": args.host, "net_devices": args.net_devices}
    amounts = {"links": args.links, "sizes_mb": sizes, "rounds": rounds, "total_mb": total_mb}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "links.json"
        run_child(_CHILD, [json.dumps({**wanted, "amounts": amounts, "output": str(output)})], report_to)
        report = msgspec.json.decode(output.read_bytes(), type=LinkReport)
    if not quiet:
        print_links(report, output_console())
    publish_json(args.json, msgspec.json.format(encode(report), indent=2) + b"\n")
    return 0 if any(found.name in LINKS for found in report.rates) else 1


def encode(report: LinkReport) -> bytes:
    """JSON with medians, ratios and the target, which the report leaves to be derived."""
    document: dict[str, Any] = {"schema_version": 1, "mode": "kv_link", **msgspec.to_builtins(report)}
    for entry, found in zip(document["rates"], report.rates, strict=True):
        entry["median"] = found.median
        entry["over_perftest"] = report.ratio(found.name, PERFTEST, found.size_mb)
    document["targets"] = [{**msgspec.to_builtins(each), "met": each.met} for each in link_targets(report)]
    return msgspec.json.encode(document)


def link_targets(report: LinkReport) -> Iterator[Target]:
    """One for each size at which both ran."""
    for size_mb in sizes_of(report):
        ratio = report.ratio("ucx", PERFTEST, size_mb)
        if ratio is not None:
            name = f"UCX link / {PERFTEST}, {size_mb} MB"
            yield Target(name=name, wanted=LINK_OVER_PERFTEST, found=ratio, at_most=False)


def sizes_of(report: LinkReport) -> list[int]:
    return sorted({found.size_mb for found in report.rates})


def print_links(report: LinkReport, console: Console) -> None:
    loads = " to ".join(f"{load:.1f}" for load in report.load_1m)
    console.print(
        f"{report.rounds} rounds of {report.total_mb} MB, all in turn; two processes on {report.cores} cores, load "
        f"average {loads}",
        highlight=False,
    )
    console.print(_rates(report))
    every = list(link_targets(report))
    if every:
        console.print(targets(every))
    for name, why in report.missing.items():
        console.print(f"[yellow]note:[/yellow] {NAMES[name]} was not measured: {escape(why)}", soft_wrap=True)


def _rates(report: LinkReport) -> Table:
    """A row for each contender, then one for each ratio; a column for each size."""
    names = [name for name in NAMES if any(found.name == name for found in report.rates)]
    sizes = sizes_of(report)
    table = plain_table("GB/s, median (min–max)", *(f"{size_mb} MB" for size_mb in sizes))
    for name in names:
        found = [report.of(name, size_mb) for size_mb in sizes]
        table.add_row(
            NAMES[name],
            *(
                "–"
                if each is None
                else f"{each.median / 1e9:.2f} ({min(each.rates) / 1e9:.2f}–{max(each.rates) / 1e9:.2f})"
                for each in found
            ),
        )
    for name in names:
        if PERFTEST in names and name != PERFTEST:
            ratios = [report.ratio(name, PERFTEST, size_mb) for size_mb in sizes]
            cells = ("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            table.add_row(f"{NAMES[name]} / {PERFTEST}", *cells)
    return table
