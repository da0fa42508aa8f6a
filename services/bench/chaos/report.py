"""The kill table: a row for each preset and process, what is wrong with it, and its forms.

Pure. Called by `command`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from rich.table import Table

from cohort.common.errors import ConfigError
from cohort.services.bench.chaos.strikes import Struck
from cohort.services.bench.output import markdown_table, plain_table

UNDISTURBED = "none"
RESTART = "all restarted"
_WORDS = ("preset", "killed")
_NUMBERS = ("requests", "failed", "elsewhere", "resumed", "wrong text", "pause, s", "TTFT, s", "back, s")
LEGEND = (
    "failed: plain streams whose connection the killed process held; elsewhere: all other failures; resumed: streams "
    "that broke, were resumed and ended; pause: the longest between two tokens of one stream; TTFT: the longest; "
    "back: until all is whole again"
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run of all requests. `killed`: the kind of process, `UNDISTURBED` or `RESTART`."""

    preset: str
    killed: str
    kills: int
    requests: int
    failed: int
    elsewhere: int
    resumed: int
    wrong: int
    longest_pause_s: float
    longest_ttft_s: float
    back_s: float
    seconds: float

    @staticmethod
    def of(preset: str, killed: str, kills: int, struck: Struck) -> Row:
        counts = struck.counts
        return Row(
            preset=preset,
            killed=killed,
            kills=kills,
            requests=counts.requests,
            failed=counts.own,
            elsewhere=counts.foreign,
            resumed=counts.resumed,
            wrong=counts.wrong,
            longest_pause_s=round(counts.longest_pause_s, 3),
            longest_ttft_s=round(counts.longest_ttft_s, 3),
            back_s=round(struck.back_s, 2),
            seconds=round(struck.seconds, 2),
        )

    @property
    def cells(self) -> list[str]:
        numbers = (self.requests, self.failed, self.elsewhere, self.resumed, self.wrong)
        times = (f"{self.longest_pause_s:.2f}", f"{self.longest_ttft_s:.2f}")
        back = "–" if self.killed == UNDISTURBED else f"{self.back_s:.1f}"
        return [self.preset, self.killed, *(f"{number:,}" for number in numbers), *times, back]

    def findings(self) -> Iterator[str]:
        """What should not have been."""
        where = f"{self.preset}, {self.killed}"
        if self.wrong:
            yield f"{where}: {self.wrong} texts are not those of the undisturbed run"
        if self.elsewhere:
            yield f"{where}: {self.elsewhere} requests failed on connections that the killed process did not hold"
        if self.failed and self.killed != "gateway":
            yield f"{where}: {self.failed} requests failed"


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The file behind `--json`. `findings`: empty when nothing was lost that should not have been."""

    schema_version: int = 1
    mode: str = "chaos"
    command: list[str]
    began: str
    model: str
    clients: int
    requests_per_client: int
    output_tokens: int
    rows: list[Row]
    findings: list[str]
    said: list[str]
    """The first failures and wrong texts, in words."""

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def as_markdown(rows: Sequence[Row]) -> str:
    return markdown_table(_WORDS, _NUMBERS, [row.cells for row in rows])


def merged(page: str, rows: Sequence[Row]) -> str:
    """The page with these rows in its kill table, the first one: instead of those of the same preset and process, else
    behind the preset's others, else at the end. Everything else stays as it is. Raises `ConfigError` where the page has
    no such table."""
    lines = page.splitlines(keepends=True)
    first = 2 + _table_at(lines)
    last = next((at for at in range(first, len(lines)) if not lines[at].startswith("|")), len(lines))
    known = {_key(line): line for line in lines[first:last]}
    new = {(row.preset, row.killed): line for row, line in zip(rows, _body(rows), strict=True)}
    presets = dict.fromkeys(preset for preset, _ in (*known, *new))
    both = known | new
    table = [line for preset in presets for key, line in both.items() if key[0] == preset]
    return "".join((*lines[:first], *table, *lines[last:]))


def _table_at(lines: Sequence[str]) -> int:
    head = as_markdown(()).splitlines(keepends=True)
    for at in range(len(lines) - 1):
        if [line.rstrip() for line in lines[at : at + 2]] == [line.rstrip() for line in head]:
            return at
    raise ConfigError(f"no kill table there; it begins with {head[0].rstrip()}")


def _body(rows: Sequence[Row]) -> list[str]:
    return as_markdown(rows).splitlines(keepends=True)[2:]


def _key(line: str) -> tuple[str, str]:
    _, preset, killed, *_ = (cell.strip() for cell in line.split("|"))
    return preset, killed


def as_table(rows: Sequence[Row]) -> Table:
    table = plain_table("preset", *_NUMBERS)
    table.columns[0].header, table.columns[0].no_wrap = "preset, killed", True
    for row in rows:
        preset, killed, *numbers = row.cells
        table.add_row(f"{preset}, {killed}", *numbers)
    return table
