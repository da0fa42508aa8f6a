"""`cohort chaos`: a pipeline under clients, one process of each kind killed in turn, and what the clients saw.

    cohort chaos
    cohort chaos --preset cohort unified disaggregated --rolling-restart --json chaos.json --markdown
    cohort chaos --kill decode --kills 3 --model ~/models/Qwen3-0.6B
    cohort chaos --preset bros --into docs/results/2026-11.md
    cohort chaos --kill gateway --set gateway.processes=2

For each preset a pipeline of its own is started. Its clients run all requests once undisturbed, which tells every text,
and then once for each kind of process, one of which is killed at a moment that the seed draws. The launcher starts it
again. A gateway takes the plain streams on its own connections along; half of the clients ask for streams that can be
resumed, and resume them. Of a kind with several processes one is killed.

Exit status: 0 nothing was lost that should not have been, 1 something was (said on stderr), 2 wrong options.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random

from rich.console import Console

from cohort.common.config import load_config
from cohort.common.errors import ConfigError
from cohort.common.paths import run_dir
from cohort.services.bench.chaos import report
from cohort.services.bench.chaos.census import Census
from cohort.services.bench.chaos.clients import Load
from cohort.services.bench.chaos.own_state import TINY, own_state
from cohort.services.bench.chaos.report import RESTART, UNDISTURBED, Row
from cohort.services.bench.chaos.strikes import Strikes, Struck
from cohort.services.bench.chaos.users import Place
from cohort.services.bench.child import Steps
from cohort.services.bench.live.pipelines import pipeline
from cohort.services.bench.output import check_writable, output_console, publish_json

KINDS = ("gateway", "predictor", "manager", "monitor", "prefill", "decode", "unified")
_RESUME_S = 60.0
_DRAIN_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--preset", nargs="+", default=["cohort"], metavar="NAME", help="one after the other")
    parser.add_argument(
        "--kill",
        nargs="*",
        default=None,
        choices=KINDS,
        metavar="KIND",
        help=f"these kinds only, in this order: {', '.join(KINDS)} (default: all that the preset has)",
    )
    parser.add_argument("--kills", type=int, default=1, metavar="N", help="of the kind, within one run of the requests")
    parser.add_argument(
        "--rolling-restart", action="store_true", help="one run more, in which `cohort restart` restarts all of them"
    )
    parser.add_argument("--clients", type=int, default=8, help="at once")
    parser.add_argument("--requests", type=int, default=100, metavar="N", help="of each client")
    parser.add_argument("--output-len", type=int, default=24, metavar="TOKENS", help="of a text, on average")
    parser.add_argument("--seed", type=int, default=0, help="of requests, of moments and of which process is killed")
    parser.add_argument(
        "--model", default=TINY, metavar="FOLDER", help="default: a tiny one; `default`: the default model"
    )
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="SECTION.OPTION=VALUE")
    parser.add_argument("--port", type=int, default=8200, help="of the pipelines that are started")
    parser.add_argument("--json", metavar="FILE", help="everything ('-': to stdout, instead of the table)")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    parser.add_argument(
        "--into", type=Path, metavar="FILE.md", help="write the rows into this page's kill table, after each preset"
    )


def run(args: argparse.Namespace) -> int:
    """Everything from parsed options. Raises `CohortError`."""
    if min(args.clients, args.requests, args.output_len, args.kills) < 1:
        raise ConfigError("--clients, --requests, --output-len and --kills must be above 0")
    if args.json not in (None, "-"):
        check_writable(Path(args.json), "--json")
    if args.into is not None:
        _write_into(args.into, ())
    began, rows, said = datetime.now(UTC).isoformat(timespec="seconds"), list[Row](), list[str]()
    errors = Console(stderr=True)
    document = report.Document(
        command=sys.argv[1:],
        began=began,
        model=args.model,
        clients=args.clients,
        requests_per_client=args.requests,
        output_tokens=args.output_len,
        rows=rows,
        findings=(findings := list[str]()),
        said=said,
    )
    for preset in args.preset:
        with Steps(errors) as steps:
            for killed, kills, struck in _measure(args, preset, steps):
                rows.append(Row.of(preset, killed, kills, struck))
                findings += rows[-1].findings()
                said += struck.counts.said[:10]
                if args.json not in (None, "-"):
                    publish_json(args.json, document.encode())
        if args.into is not None:
            _write_into(args.into, [row for row in rows if row.preset == preset])
    if args.json == "-":
        publish_json("-", document.encode())
    elif args.markdown:
        sys.stdout.write(report.as_markdown(rows))
    else:
        console = output_console()
        console.print(report.as_table(rows))
        console.print(report.LEGEND, style="dim")
    for finding in findings and [*findings, *said]:
        errors.print(finding, style="red", highlight=False, markup=False)
    return 1 if findings else 0


def _write_into(page: Path, rows: Sequence[Row]) -> None:
    """Raises `ConfigError`."""
    try:
        page.write_text(report.merged(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--into {page}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"--into {page}: {error}") from None


def _measure(args: argparse.Namespace, preset: str, steps: Steps) -> Iterator[tuple[str, int, Struck]]:
    """All runs of one preset: what was killed, how often, and what came of it."""
    load = Load(args.clients, args.requests, args.output_len, args.seed)
    with tempfile.TemporaryDirectory(prefix="cohort-chaos-") as folder:
        overlay = own_state(args.model, Path(folder), [], _RESUME_S)
        for section in ("gateway", "engine"):
            overlay[section]["drain_s"] = _DRAIN_S
        steps.report(0, load.total, f"{preset}: starting")
        with pipeline(preset, overlay, args.port, ["engine.threads=1", *args.settings]) as served:
            workers = load_config([run_dir(args.port) / "resolved.yaml"]).instance_roles
            strikes = Strikes(
                Place(served.url, served.monitor_url, [""], time.monotonic()),
                Census(run_dir(args.port)),
                len(workers),
                load,
                Random(f"{args.seed}/{preset}"),
            )
            kinds = [kind for kind in args.kill if strikes.one_of(kind)] if args.kill is not None else _kinds(strikes)
            yield UNDISTURBED, 0, asyncio.run(strikes.undisturbed(_teller(steps, load, preset, "undisturbed")))
            for kind in kinds:
                tell = _teller(steps, load, preset, f"kill -9 of a {kind}")
                yield kind, args.kills, asyncio.run(strikes.kill(kind, args.kills, tell))
            if args.rolling_restart:
                tell = _teller(steps, load, preset, "restarted one after the other")
                yield RESTART, 0, asyncio.run(strikes.restart(args.port, tell))


def _kinds(strikes: Strikes) -> list[str]:
    """Those that this pipeline has."""
    return [kind for kind in KINDS if strikes.one_of(kind) is not None]


def _teller(steps: Steps, load: Load, preset: str, what: str) -> Callable[[int], None]:
    """The progress of one run: a bar moves every second; where there is none, one line tells that it begins."""
    told = False

    def tell(done: int) -> None:
        nonlocal told
        if steps.live or not told:
            steps.report(done, load.total, f"{preset}: {what}")
        told = True

    return tell
