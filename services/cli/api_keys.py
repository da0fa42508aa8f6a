"""`cohort keys add | list | show | set | revoke | usage`: the API keys of clients, and what they used.

Edits the file that `keys.file` of a gateway's configuration names (`keys/key_file.py`); gateways see a change within
a second. A key is printed once, by `add`: no file holds it. Called by `keys.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from cohort.common.command_line import Parser
from cohort.common.errors import ConfigError
from cohort.common.keys.key_file import OwnLimits, editing, new_key, read_keys, revoked
from cohort.common.keys.key_usage import UsageStore, day_of, usage_file

COMMANDS = ("add", "list", "show", "set", "revoke", "usage")
FILE_VARIABLE = "COHORT_KEYS_FILE"
_LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "concurrent_requests")

EPILOG = f"""\
examples:
  cohort keys add alice --limit requests_per_minute=60 --limit rt.tokens_per_minute=20000
  cohort keys add nightly --limit be.tokens_per_day=5000000 --limit rt.requests_per_minute=1 --weight 0.5
  cohort keys add boss --admin
  cohort serve --set keys.file=$HOME/.config/cohort/keys.json
  cohort keys list
  cohort keys show alice
  cohort keys set alice --limit requests_per_minute=default --weight 2
  cohort keys revoke alice
  cohort keys usage --days 7

A limit is one of {", ".join(_LIMITS)}; rt. or be. before it: of real-time or
best-effort requests alone. 0 = no limit; `default` takes a limit of one's own away again."""


def default_file() -> Path:
    if named := os.environ.get(FILE_VARIABLE):
        return Path(named)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "cohort" / "keys.json"


def main(words: Sequence[str]) -> int:
    """Run one of `COMMANDS`. Exit code 0; errors are `CohortError`s, which end the process with 2."""
    options = _parser().parse_args(words)
    match options.word:
        case "add":
            return _add(options)
        case "list":
            return _list(options)
        case "show":
            return _show(options)
        case "set":
            return _set(options)
        case "revoke":
            return _revoke(options)
        case _:
            return _usage(options)


def _parser() -> Parser:
    parser = Parser(prog="cohort keys")
    words = parser.add_subparsers(dest="word", required=True)
    file = Parser(add_help=False)
    file.add_argument(
        "--file", type=Path, default=default_file(), help=f"file of keys (default: ${FILE_VARIABLE}, else %(default)s)"
    )
    rights = Parser(add_help=False)
    rights.add_argument("--limit", action="append", default=[], metavar="[rt.|be.]LIMIT=N", help="may be repeated")
    rights.add_argument("--weight", type=float, help="share of the cluster beside other keys (default: 1)")

    def word(name: str, summary: str, parents: Iterable[Parser]) -> argparse.ArgumentParser:
        return words.add_parser(name, help=summary, description=summary, parents=list(parents), epilog=EPILOG)

    adding = word("add", "make a key and print it, once", (file, rights))
    adding.add_argument("name", metavar="NAME", help="a label of metrics, too")
    adding.add_argument("--admin", action="store_true", help="may read what all keys used (GET /v1/usage?keys=all)")
    word("list", "all keys of the file", (file,))
    word("show", "one key: its limits and share", (file,)).add_argument("name", metavar="NAME|ID")
    word("set", "change the limits or the weight of a key", (file, rights)).add_argument("name", metavar="NAME|ID")
    word("revoke", "a key is good for nothing any more", (file,)).add_argument("name", metavar="NAME|ID")
    usage = word("usage", "what each key used, by day and class", ())
    usage.add_argument(
        "--usage-file", type=Path, help="key-usage.sqlite3 of its state.folder (default: in the cache folder)"
    )
    usage.add_argument("--days", type=int, default=30, help="today and so many days before it (default: %(default)s)")
    usage.add_argument("--key", metavar="NAME|ID", help="of this key alone")
    usage.add_argument("--json", action="store_true", help="a line of JSON for each day, key and class")
    return parser


def _limits(given: Sequence[str]) -> dict[str, dict[str, int | None]]:
    """Return the given limits by class; None removes one. Raises `ConfigError`."""
    named: dict[str, dict[str, int | None]] = {"rt": {}, "be": {}}
    for text in given:
        place, _, value = text.partition("=")
        head, dot, name = place.partition(".")
        classes = (head,) if dot and head in named else ("rt", "be")
        name = name if dot and head in named else place
        if name not in _LIMITS or not (value.isdecimal() or value == "default"):
            raise ConfigError(f"--limit {text}: [rt.|be.]LIMIT=N, where LIMIT is one of {', '.join(_LIMITS)}")
        for each in classes:
            named[each][name] = None if value == "default" else int(value)
    return named


def _add(options: argparse.Namespace) -> int:
    limits = _limits(options.limit)
    with editing(options.file) as held:
        held[0], stored, secret = new_key(
            held[0],
            options.name,
            int(time.time()),
            admin=options.admin,
            weight=_weight(options, 1.0),
            rt=OwnLimits(**limits["rt"]),
            be=OwnLimits(**limits["be"]),
        )
    sys.stdout.write(f"{secret}\n")
    sys.stderr.write(
        f"{stored.name} ({stored.id}) is in {options.file}. The key above is shown this once. Gateways with "
        f"keys.file={options.file} know it in a moment.\n"
    )
    return 0


def _weight(options: argparse.Namespace, otherwise: float) -> float:
    weight = otherwise if options.weight is None else float(options.weight)
    if not 0 < weight <= 1e6:  # also for NaN
        raise ConfigError(f"--weight {weight:g}: above 0, and at most a million")
    return weight


def _list(options: argparse.Namespace) -> int:
    for key in read_keys(options.file, option="--file").keys:
        state = "active" if key.revoked_s is None else f"revoked {day_of(key.revoked_s)}"
        more = " admin" if key.admin else ""
        made = day_of(key.created_s)
        sys.stdout.write(f"{key.id}  {key.name:24} made {made}  weight {key.weight:g}  {state}{more}\n")
    return 0


def _show(options: argparse.Namespace) -> int:
    key = read_keys(options.file, option="--file").named(options.name)
    if key is None:
        raise ConfigError(f"{options.file}: no key is named {options.name}")
    sys.stdout.write(
        f"name     {key.name}\nid       {key.id}\nmade     {day_of(key.created_s)}\n"
        f"state    {'active' if key.revoked_s is None else f'revoked {day_of(key.revoked_s)}'}\n"
        f"admin    {'yes' if key.admin else 'no'}\nweight   {key.weight:g}\n"
    )
    for name in ("rt", "be"):
        own = getattr(key, name)
        for limit in _LIMITS:
            value = getattr(own, limit)
            sys.stdout.write(f"{name}.{limit:22}{'as configured' if value is None else value or 'no limit'}\n")
    return 0


def _set(options: argparse.Namespace) -> int:
    limits = _limits(options.limit)
    with editing(options.file) as held:
        key = held[0].named(options.name)
        if key is None or key.revoked_s is not None:
            raise ConfigError(f"{options.file}: no active key is named {options.name}")
        changed = msgspec.structs.replace(
            key,
            weight=_weight(options, key.weight),
            rt=msgspec.structs.replace(key.rt, **limits["rt"]),
            be=msgspec.structs.replace(key.be, **limits["be"]),
        )
        keys = tuple(changed if each is key else each for each in held[0].keys)
        held[0] = msgspec.structs.replace(held[0], keys=keys)
    sys.stdout.write(f"{key.name} ({key.id}) is changed\n")
    return 0


def _revoke(options: argparse.Namespace) -> int:
    with editing(options.file) as held:
        held[0], key = revoked(held[0], options.name, int(time.time()))
    sys.stdout.write(f"{key.name} ({key.id}) is revoked; gateways refuse it within a second\n")
    return 0


def _usage(options: argparse.Namespace) -> int:
    store = UsageStore(options.usage_file or usage_file(), read_only=True)
    try:
        rows = store.rows(since=day_of(time.time() - 86_400 * max(0, options.days)))
    finally:
        store.close()
    rows = [row for row in rows if options.key in (None, row.key_name, row.key_id)]
    if options.json:
        for row in rows:
            sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
        return 0
    sys.stdout.write(
        f"{'date':10}  {'key':24} {'class':5} {'requests':>9} {'prompt':>12} {'completion':>12} {'refused':>8} "
        f"{'with SLO':>9} {'met':>7}\n"
    )
    for row in rows:
        met = "-" if row.slo_attainment is None else f"{row.slo_attainment:.1%}"
        sys.stdout.write(
            f"{row.date:10}  {row.key_name:24} {row.traffic_class:5} {row.requests:9} {row.prompt_tokens:12} "
            f"{row.completion_tokens:12} {row.refused:8} {row.slo_requests:9} {met:>7}\n"
        )
    return 0
