"""A reproduced figure: the paper's number, and how ours comes about: runs of a `Lab`, kept in a folder; and how its
numbers are compared. Judged by `verdicts.py`."""

from __future__ import annotations

import enum
import hashlib
import itertools
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from cohort import __version__
from cohort.common.config import CONFIGS_DIR
from cohort.common.keys.private_files import write_private
from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.core.sim_options import SimOptions

FOLDER = CONFIGS_DIR / "reproduction"


class Kind(enum.Enum):
    OVER = "over"
    """A factor against another system: 1 = no effect."""
    CHANGE = "change"
    """A change in per cent: 0 = no effect."""
    VALUE = "value"
    """A measured value."""
    AT_MOST = "at_most"
    AT_LEAST = "at_least"
    MORE = "more"
    """The paper says who wins, without a number: ours is above the given value."""
    LESS = "less"
    NOT_COMPARABLE = "untold"
    """The paper defines it otherwise than we can measure it."""


class Standing(enum.Enum):
    CLAIM = enum.auto()
    """A number, a bound or a direction that the paper prints, in the setting chosen for it."""
    READING = enum.auto()
    """The same in another setting: another reading of what is open, a stronger baseline, another model."""
    ANCHOR = enum.auto()
    """A number that the paper prints, by which a parameter that it does not print was chosen: whether ours is near says
    how well that could be done, and nothing of what was claimed."""
    UNCOMPARED = enum.auto()
    """The paper prints nothing to compare it with."""


class _StoredRun(msgspec.Struct, frozen=True):
    key: str
    asked: bool
    """Whether the seed had a part in it."""
    report: SimReport


@dataclass(slots=True)
class Lab:
    """Runs simulations of one seed, each once: several figures look at the same run from different sides.

    Whether a figure is a matter of chance is not declared but seen: it is where it, or a run that it looks at, used
    the seed. `scatter`: of iterations' times in every run (`scatter.py`). `folder`: where runs are kept, so that
    an interrupted measurement repeats none, nor one of other figures that look at the same runs."""

    chosen_seed: int = 0
    scatter: float | None = None
    folder: Path | None = None
    _done: dict[Hashable, _StoredRun] = field(default_factory=dict)
    _used_seed: bool = False

    @property
    def seed(self) -> int:
        """Seed of workloads and of everything else that is drawn in a run."""
        self._used_seed = True
        return self.chosen_seed

    def options(self, **given: Any) -> SimOptions:
        return SimOptions(seed=self.seed, scatter=self.scatter, **given)

    def run(self, key: Hashable, simulation: Callable[[], SimReport]) -> SimReport:
        if key not in self._done:
            self._done[key] = self._stored(key) or self._ran(key, simulation)
        self._used_seed |= self._done[key].asked
        return self._done[key].report

    def _ran(self, key: Hashable, simulation: Callable[[], SimReport]) -> _StoredRun:
        before, self._used_seed = self._used_seed, False
        report = simulation()
        found = _StoredRun(repr(key), self._used_seed, report)
        self._used_seed = before
        if self.folder is not None:  # whole or not at all: other processes read the folder
            self.folder.mkdir(parents=True, exist_ok=True)
            write_private(self._path(self.folder, key), msgspec.msgpack.encode(found))
        return found

    def _stored(self, key: Hashable) -> _StoredRun | None:
        """Return a stored run. None: not stored, or of an earlier form."""
        if self.folder is None:
            return None
        try:
            stored = msgspec.msgpack.decode(self._path(self.folder, key).read_bytes(), type=_StoredRun)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return stored if stored.key == repr(key) else None

    def _path(self, folder: Path, key: Hashable) -> Path:
        """Name the file of a run by a digest. A folder belongs to one version of the code."""
        parts = [__version__, repr(key), self.chosen_seed, self.scatter]
        return folder / f"{hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:24]}.run"

    def measured(self, measure: Callable[[Lab], float]) -> tuple[float, bool]:
        """Measure a number. Return it, and whether the seed had a part in it."""
        self._used_seed = False
        return float(measure(self)), self._used_seed


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a paper and the measurement that answers it. `system` is the preset family it belongs to;
    `baseline` whom the number is about, or against whom."""

    id: str
    system: str
    figure: str
    workload: str
    baseline: str
    metric: str
    unit: str
    paper: float
    measure: Callable[[Lab], float]
    note: str = ""
    standing: Standing = Standing.CLAIM
    kind: Kind | None = None
    """Kind of comparison, where neither its claim nor its unit says it."""
    paper_to: float | None = None
    """Other end of a range that the paper prints; `paper` is the one nearer to no effect."""
    exercised: Callable[[Lab], float] | None = None
    """Percentage of the requests behind the number that used the mechanism it is about: were split, or borrowed."""


@dataclass(frozen=True, slots=True)
class Paper:
    """Maker of one system's rows; `name` is the paper's, in their headings."""

    system: str
    name: str

    def row(
        self,
        id_: str,
        workload: str,
        baseline: str,
        metric: str,
        unit: str,
        paper: float,
        measure: Callable[[Lab], float],
        note: str = "",
        standing: Standing = Standing.CLAIM,
        kind: Kind | None = None,
        paper_to: float | None = None,
        where: str = "",
        exercised: Callable[[Lab], float] | None = None,
    ) -> Figure:
        """Make a row. `id_` begins with the figure's number, unless `where` says where in the paper it stands."""
        figure = f"{self.name} {where or 'Fig. ' + id_.split('-')[0]}"
        about = (self.system, figure, workload, baseline, metric, unit, paper)
        return Figure(f"{self.system}-{id_}", *about, measure, note, standing, kind, paper_to, exercised)


# -- what the papers claim, and why rows differ, as `configs/reproduction/` says it -----------------------------------


@dataclass(frozen=True, slots=True)
class Reason:
    """Cause why rows whose ids begin so are not reproduced, and the command that shows it. The longest begin counts."""

    begins: tuple[str, ...]
    why: str
    shown_by: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Statement of a paper about one group of models. `ids` are ids of figures."""

    paper: str
    statement: str
    kind: Kind
    ids: tuple[str, ...]


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter that a paper does not print, chosen by a figure of it. `anchors`: figures that chose it; `rows` are
    beginnings of ids of those measured with it, but for the ones that begin as `without` says. Both stand as a shell
    expands them."""

    name: str
    file: str
    value: str
    what: str
    chosen_by: str
    anchors: str = ""
    rows: str = ""
    without: str = ""

    def is_under(self, id_: str) -> bool:
        """Return whether a row rests on it."""
        return id_.startswith(_beginnings(self.rows)) and not id_.startswith(_beginnings(self.without))


@cache
def _beginnings(patterns: str) -> tuple[str, ...]:
    return expanded(patterns)


@cache
def shipped_constants() -> tuple[Constant, ...]:
    return msgspec.yaml.decode((FOLDER / "constants.yaml").read_bytes(), type=tuple[Constant, ...])


@cache
def shipped_unmapped() -> dict[str, str]:
    """Return, by paper, the printed numbers that no row compares."""
    return msgspec.yaml.decode((FOLDER / "unmapped.yaml").read_bytes(), type=dict[str, str])


@cache
def shipped_claims() -> tuple[Claim, ...]:
    papers = msgspec.yaml.decode((FOLDER / "claims.yaml").read_bytes(), type=dict[str, list[dict[str, str]]])
    return tuple(_claim(paper, entry) for paper, entries in papers.items() for entry in entries)


@cache
def shipped_reasons() -> tuple[Reason, ...]:
    entries = msgspec.yaml.decode((FOLDER / "reasons.yaml").read_bytes(), type=list[dict[str, str]])
    return tuple(Reason(expanded(entry.pop("begins")), **entry) for entry in entries)


class _Denominator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rows: tuple[str, ...]
    renamed: dict[str, str]


@cache
def shipped_denominator() -> tuple[str, ...]:
    """Return the ids, as they are now, of the rows among which the share of reproduced ones is counted."""
    found = msgspec.yaml.decode((FOLDER / "denominator.yaml").read_bytes(), type=_Denominator)
    return tuple(found.renamed.get(name, name) for name in found.rows)


def _claim(paper: str, entry: dict[str, str]) -> Claim:
    """Read a claim. The entry's key for its ids names the kind of comparison."""
    kind = next(kind for kind in Kind if kind.value in entry)
    return Claim(paper, kind=kind, ids=expanded(entry.pop(kind.value)), **entry)


def expanded(patterns: str) -> tuple[str, ...]:
    """Expand names with spaces between them as a shell does: `a-{b,c}` is a-b and a-c."""
    parts = [[part.split(",") for part in re.split("[{}]", pattern)] for pattern in patterns.split()]
    return tuple("".join(chosen) for of_pattern in parts for chosen in itertools.product(*of_pattern))
