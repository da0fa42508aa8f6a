"""`cohort bench soak`: a pipeline of its own under mixed traffic, its processes killed, stopped and ended meanwhile.

    cohort bench soak --minutes 60 --json soak.json
    cohort bench soak --minutes 10 --no-kills --preset cohort --model ~/models/Qwen3-0.6B

Clients of all APIs ask for what a quiet run has answered before, and must get the same: greedy and seeded text, forms,
tools, choices, batches. Some leave, read slowly, resume their streams, or ask for what must be refused. Faults come for
the first part of the time (`--kills-for`), one at a time; the rest is undisturbed, so that every process has a life
that is long enough for its memory to be judged. Then all clients go, and after a quiet time no process may hold a
request, block, lease or stream, nor more threads, descriptors or tasks than before; after the pipeline's end no
process, file or shared memory may be left. Without `--model` a tiny one is made, and half a core is enough.

Exit status: 0 all is accounted for, 1 something was found, 2 wrong options.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from cohort.common.config import load_config
from cohort.common.errors import ConfigError
from cohort.common.paths import run_dir
from cohort.services.bench.chaos import soak_report as report
from cohort.services.bench.chaos.accounts import Verdict
from cohort.services.bench.chaos.census import Census
from cohort.services.bench.chaos.leftovers import unknown_files
from cohort.services.bench.chaos.own_state import TINY, own_state
from cohort.services.bench.chaos.soak import Soak, Terms
from cohort.services.bench.chaos.users import Place
from cohort.services.bench.live.pipelines import pipeline
from cohort.services.bench.output import check_writable, publish_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--minutes", type=float, default=10.0, help="of traffic; start, quiet time and end come beside")
    parser.add_argument("--preset", default="disaggregated")
    parser.add_argument(
        "--model", default=TINY, metavar="FOLDER", help="default: a tiny one; `default`: the default model"
    )
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="SECTION.OPTION=VALUE")
    parser.add_argument("--clients", type=int, default=12, help="at once, besides one that runs batches")
    parser.add_argument(
        "--rate", type=float, default=4.0, help="requests a second of all clients, while answers are quick"
    )
    parser.add_argument("--kills", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--kill-every-s", type=float, default=40.0, help="mean pause between a recovery and the next fault"
    )
    parser.add_argument(
        "--victims", nargs="+", default=[], metavar="NAME", help="these processes only (gateway, decode-0)"
    )
    parser.add_argument("--kills-for", type=float, default=0.6, metavar="SHARE", help="of the time")
    parser.add_argument("--sample-s", type=float, default=5.0, help="between two looks at the processes")
    parser.add_argument("--skip-s", type=float, default=300.0, help="of a life, before its memory is judged")
    parser.add_argument(
        "--slope-limit", type=float, default=16.0, metavar="MB/H", help="growth of memory that is certain"
    )
    parser.add_argument("--quiet-s", type=float, default=60.0, help="after the clients are gone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8200, help="of the pipeline that is started")
    parser.add_argument("--json", metavar="FILE", help="everything; written every minute while it runs")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print what such a file says so far, and run nothing")


def run(args: argparse.Namespace) -> int:
    """Everything from parsed options. Raises `CohortError`."""
    if args.show is not None:
        sys.stdout.write(report.table(report.read_document(args.show)))
        return 0
    if args.minutes <= 0 or args.clients < 1 or args.rate <= 0 or not 0 <= args.kills_for <= 1:
        raise ConfigError("--minutes, --clients and --rate must be above 0, --kills-for between 0 and 1")
    if args.json not in (None, "-"):
        check_writable(Path(args.json), "--json")
    terms = Terms(
        seconds=60 * args.minutes,
        clients=args.clients,
        rate=args.rate,
        kill_every_s=args.kill_every_s if args.kills else 0.0,
        victims=tuple(args.victims),
        kills_for_s=60 * args.minutes * args.kills_for,
        sample_s=args.sample_s,
        quiet_s=args.quiet_s,
        seed=args.seed,
    )
    began = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="cohort-soak-") as folder, _temporary(Path(folder)) as temporary:
        state = Path(folder) / "state"
        keys = [secrets.token_hex(8), secrets.token_hex(8)]
        settings = ["engine.threads=1", *args.settings]
        census = Census(run_dir(args.port))
        resume_s = max(15.0, min(20.0, args.quiet_s / 2))
        overlay = own_state(args.model, Path(folder), keys, resume_s)
        with pipeline(args.preset, overlay, args.port, settings) as served:
            place = Place(served.url, served.monitor_url, keys, time.monotonic())
            workers = frozenset(load_config([run_dir(args.port) / "resolved.yaml"]).instance_roles)
            soak = Soak(place, census, terms, workers, say=_say)

            def publish() -> None:
                if args.json not in (None, "-"):
                    publish_json(args.json, _document(args, began, soak, []).encode())

            asyncio.run(soak.run(publish))
        findings = [*soak.findings, *census.left(), *unknown_files(run_dir(args.port), state, temporary)]
    document = _document(args, began, soak, findings, finished=True)
    if args.json:
        publish_json(args.json, document.encode())
    if args.json != "-":
        sys.stdout.write(report.table(document))
    return 1 if document.findings else 0


def _document(
    args: argparse.Namespace, began: str, soak: Soak, found: list[str], *, finished: bool = False
) -> report.Document:
    accounts, census = soak.accounts, soak.census
    lives = report.lives(census.series, census.cpu_s, args.skip_s)
    findings = [*found, *report.growing(lives, args.slope_limit)]
    if accounts.unaccounted_total:
        findings.insert(0, f"{accounts.unaccounted_total} requests are not accounted for")
    return report.Document(
        command=sys.argv[1:],
        began=began,
        seconds=soak.place.now_s(),
        finished=finished,
        preset=args.preset,
        model=args.model,
        cpu_s=sum(census.cpu_s.values()),
        requests=accounts.requests,
        verdicts={str(verdict): accounts.total(verdict) for verdict in Verdict},
        by_kind=report.kinds(accounts),
        refusals=dict(accounts.refusals),
        faults=accounts.faults,
        lives=lives,
        short_lives=report.short(census.series),
        slope_limit_mb_per_h=args.slope_limit,
        counters=soak.counters,
        unaccounted=accounts.unaccounted,
        findings=findings,
    )


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """The pipeline's folder of temporary files, so that those it leaves are seen."""
    path = folder / "tmp"
    path.mkdir()
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(path)
    try:
        yield path
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
