"""`cohort chaos`: a pipeline of its own under clients that compare, its processes broken one after the other.

    cohort chaos
    cohort chaos --preset cohort unified disaggregated --rolling-restart --json chaos.json
    cohort chaos --kill decode --kills 3 --model ~/models/Qwen3-0.6B
    cohort chaos --kill gateway --set gateway.processes=2
    cohort chaos --kill decode+prefill stop:decode-0
    cohort chaos --census --preset cohort disaggregated --json census.json
    cohort chaos --minutes 60 --json soak.json

The kill table: clients run all requests once undisturbed, which tells every text, and then once for each kind of
process, one of which is killed at a moment that the seed draws. The launcher starts it again. A gateway takes the plain
streams on its own connections along; half of the clients ask for streams that can be resumed, and resume them. Of a
kind with several processes one is killed. `a+b` kills two at once, `stop:a` stops one for six seconds.

With `--census` 100 clients stream greedy and seeded text, text bound by a grammar, two choices, text of an adapter and
text that drafts foresee; all resume. Every process, and every two, are killed and stopped in turn.

With `--minutes` a soak: clients of all APIs ask for what a quiet run has answered
before, and must get the same: greedy and seeded text, forms, tools, choices. Some leave, read slowly, resume
their streams, or ask for what must be refused. Faults of all processes come for the first part of the time
(`--kills-for`), one at a time; the rest is undisturbed, so that every process has a life that is long enough for its
memory to be judged. Then all clients go, and after a quiet time no process may hold a request, block, lease or stream,
nor more threads, descriptors or tasks than before; after the pipeline's end no process, file or shared memory may be
left. Without `--model` a tiny one is made, and half a core is enough.

Exit status: 0 nothing was lost that should not have been, 1 something was (said on stderr), 2 wrong options.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cohort.common.config import load_config
from cohort.common.errors import ConfigError
from cohort.common.hub.model_source import find
from cohort.common.paths import default_model_dir, run_dir
from cohort.services.bench.chaos import report, tiny_model
from cohort.services.bench.chaos.accounts import TOGETHER
from cohort.services.bench.chaos.catalogue import SERVED
from cohort.services.bench.chaos.census import Census
from cohort.services.bench.chaos.kill_table import STOPPED, KillTable, Load
from cohort.services.bench.chaos.report import RESTARTED, UNDISTURBED, Run
from cohort.services.bench.chaos.soak import Soak, Terms, unknown_files
from cohort.services.bench.chaos.users import Place
from cohort.services.bench.live.pipelines import pipeline
from cohort.services.bench.output import check_output, publish_json

KINDS = ("gateway", "predictor", "manager", "monitor", "prefill", "decode", "unified")
_TABLE_RESUME_S = 120.0
_TABLE_DRAIN_S = 30.0
_SOAK_DRAIN_S = 5.0
TINY = "tiny"
_ADAPTER = "chaos"
_TABLE = {"clients": 8, "requests": 100, "output_len": 24}
_CENSUS = {"clients": 100, "requests": 3, "output_len": 64}
_TINY_KV_BYTES = 16 << 20

Publish = Callable[[list[Run]], None]
"""Writer of the runs of this preset, so far."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--preset", nargs="+", default=["cohort"], metavar="NAME", help="one after the other")
    parser.add_argument(
        "--kill",
        nargs="*",
        type=_victim,
        default=None,
        metavar="KIND",
        help=f"these kinds or processes (decode-0) only, in this order: {', '.join(KINDS)}; a+b, stop:a "
        "(default: all of the preset; without a word none)",
    )
    parser.add_argument("--census", action="store_true", help="every process and every two, under mixed streams")
    parser.add_argument("--rolling-restart", action="store_true", help="`cohort restart` is a fault, too")
    parser.add_argument("--clients", type=int, help=f"at once (default: 8, of a census {_CENSUS['clients']})")
    parser.add_argument("--seed", type=int, default=0, help="of requests, of moments and of which process is killed")
    parser.add_argument(
        "--model",
        default=TINY,
        metavar="MODEL",
        help="folder, or id; default: a tiny one; `default`: the default model",
    )
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="SECTION.OPTION=VALUE")
    parser.add_argument("--port", type=int, default=8200, help="of the pipelines that are started")
    parser.add_argument("--json", metavar="FILE", help="everything so far, as it goes ('-': to stdout, in the end)")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print what such a file says so far, and run nothing")
    table = parser.add_argument_group("the kill table")
    table.add_argument("--kills", type=int, default=1, metavar="N", help="of the kind, within one run of the requests")
    table.add_argument("--requests", type=int, metavar="N", help=f"of each client (100, {_CENSUS['requests']})")
    table.add_argument(
        "--output-len", type=int, metavar="TOKENS", help=f"of a text, on average (24, {_CENSUS['output_len']})"
    )
    soak = parser.add_argument_group("a soak")
    soak.add_argument("--minutes", type=float, default=None, help="of traffic; start, quiet time and end come beside")
    soak.add_argument("--rate", type=float, default=4.0, help="requests a second of all clients, if answers are quick")
    soak.add_argument("--kill-every-s", type=float, default=40.0, help="mean, between a recovery and the next fault")
    soak.add_argument("--kills-for", type=float, default=0.6, metavar="SHARE", help="of the time")
    soak.add_argument("--sample-s", type=float, default=5.0, help="between two looks at the processes")
    soak.add_argument("--skip-s", type=float, default=300.0, help="of a life, before its memory is judged")
    soak.add_argument("--slope-limit", type=float, default=16.0, metavar="MB/H", help="certain growth of memory")
    soak.add_argument("--quiet-s", type=float, default=60.0, help="after the clients are gone")


def _victim(name: str) -> str:
    for part in name.removeprefix(STOPPED).split(TOGETHER):
        if re.split("[-/]", part)[0] not in KINDS:
            raise argparse.ArgumentTypeError(f"no process is named {part}; the kinds are {', '.join(KINDS)}")
    return name


def run(args: argparse.Namespace) -> int:
    """Run the command with parsed options. Raises `CohortError`."""
    if args.show is not None:
        return _print(report.read_document(args.show))
    for name, value in (_CENSUS if args.census else _TABLE).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.census and args.minutes is not None:
        raise ConfigError("--census is a kill table; --minutes is a soak")
    if min(args.clients, args.requests, args.output_len, args.kills) < 1:
        raise ConfigError("--clients, --requests, --output-len and --kills must be above 0")
    if args.minutes is not None and (args.minutes <= 0 or args.rate <= 0 or not 0 <= args.kills_for <= 1):
        raise ConfigError("--minutes and --rate must be above 0, --kills-for between 0 and 1")
    check_output(args)
    began, done = datetime.now(UTC).isoformat(timespec="seconds"), list[Run]()

    def document(runs: list[Run], *, finished: bool = False) -> report.Document:
        return report.Document(command=sys.argv[1:], began=began, model=args.model, finished=finished, runs=runs)

    def publish(runs: list[Run]) -> None:
        if args.json not in (None, "-"):
            publish_json(args.json, document([*done, *runs]).encode())

    for preset in args.preset:
        done += (_table if args.minutes is None else _soak)(args, preset, publish)
    final = document(done, finished=True)
    publish_json(args.json, final.encode())
    return _print(final, tables=args.json != "-")


def _print(document: report.Document, *, tables: bool = True) -> int:
    if tables:
        sys.stdout.write(report.table(document))
    for finding in document.findings or ["nothing was found"]:
        _log(finding)
    return 1 if document.findings else 0


def _table(args: argparse.Namespace, preset: str, publish: Publish) -> list[Run]:
    adapter = _ADAPTER if args.census and args.model == TINY else ""
    load = Load(args.clients, args.requests, args.output_len, args.seed, args.census, adapter)
    runs = list[Run]()
    with tempfile.TemporaryDirectory(prefix="cohort-chaos-") as folder:
        overlay = _own_state(args.model, Path(folder), [], _TABLE_RESUME_S, _TABLE_DRAIN_S)
        if adapter:
            overlay["model"]["lora"] = {adapter: str(tiny_model.write_adapter(Path(folder) / adapter))}
        with pipeline(preset, overlay, args.port, ["engine.threads=1", *args.settings]) as served:
            place = Place(served.url, served.monitor_url, [""], time.monotonic())
            table = KillTable(preset, place, Census(run_dir(args.port)), len(_workers(args.port)), load, _log)
            kinds = (table.all_faults() if args.census else KINDS) if args.kill is None else args.kill
            last = [RESTARTED] if args.rolling_restart else []
            for broken in (UNDISTURBED, *filter(table.has, kinds), *last):
                kills = 0 if broken in (UNDISTURBED, RESTARTED) else args.kills
                if (run := asyncio.run(table.run(broken, kills))) is not None:
                    runs.append(run)
                    publish(runs)
    return runs


def _soak(args: argparse.Namespace, preset: str, publish: Publish) -> list[Run]:
    seconds = 60 * args.minutes
    given = {name: getattr(args, name) for name in Terms.__dataclass_fields__ if hasattr(args, name)}
    terms = Terms(seconds=seconds, kills_for_s=seconds * args.kills_for, **given)
    with tempfile.TemporaryDirectory(prefix="cohort-soak-") as folder, _temporary(Path(folder)) as temporary:
        keys = [secrets.token_hex(8), secrets.token_hex(8)]
        census = Census(run_dir(args.port))
        resume_s = max(15.0, min(20.0, args.quiet_s / 2))
        overlay = _own_state(args.model, Path(folder), keys, resume_s, _SOAK_DRAIN_S)
        with pipeline(preset, overlay, args.port, ["engine.threads=1", *args.settings]) as served:
            place = Place(served.url, served.monitor_url, keys, time.monotonic())
            soak = Soak(place, census, terms, _workers(args.port), log=_log)
            asyncio.run(soak.run(lambda: publish([_run_of(args, preset, soak, [])])))
        leftovers = [*census.leftovers(), *unknown_files(run_dir(args.port), Path(folder) / "state", temporary)]
    return [_run_of(args, preset, soak, leftovers)]


def _run_of(args: argparse.Namespace, preset: str, soak: Soak, leftovers: list[str]) -> Run:
    """Return what a soak has found so far."""
    accounts, census = soak.accounts, soak.census
    lives = report.lives(census.series, census.cpu_s, args.skip_s)
    return Run.of(
        preset,
        report.DECK,
        soak.place.now_s(),
        accounts,
        [*soak.findings, *leftovers, *report.growing(lives, args.slope_limit)],
        by_kind=report.kinds(accounts),
        cpu_s=sum(census.cpu_s.values()),
        lives=lives,
        short_lives=report.short(census.series),
        counters=soak.counters,
    )


def _own_state(model: str, folder: Path, keys: list[str], resume_s: float, drain_s: float) -> dict[str, Any]:
    """Return configuration of a pipeline that is broken on purpose, with all its state in `folder`. `model`: a folder,
    `tiny` (written here) or `default`. The waits are short, so that what a client leaves behind soon ends."""
    state = folder / "state"
    state.mkdir(exist_ok=True)
    kv: dict[str, Any] = {}
    match model:
        case "tiny":
            path, kv = tiny_model.write(folder / "model"), {"memory_bytes": _TINY_KV_BYTES}
        case "default":
            path = default_model_dir()
        case _:
            path = find(model).path
    return {
        "model": {"path": str(path), "dtype": "float32", "served_name": SERVED},
        "kv": kv,
        "gateway": {"api_keys": keys, "resume_s": resume_s, "write_timeout_s": 10.0},
        "state": {"folder": str(state)},
        "batch": {"concurrency": 4},
        "drain_s": drain_s,
    }


def _workers(port: int) -> frozenset[str]:
    return frozenset(load_config([run_dir(port) / "resolved.yaml"]).instance_roles)


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Make the pipeline's folder of temporary files, so that those it leaves are seen."""
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


def _log(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
