"""The account of every request: right, rightly refused, refused, cut off with its gateway, left by its client; or not.

    right       the text of the quiet run, the status that was due
    refused     429 or 503 with an error that says why, while something was broken; 429 also else
    cut         its connection ended with its gateway, which was killed or told to end: visible, and documented
    left        its own client went
    wrong       another answer than the quiet run's
    lost        everything else: an error without a cause, a silence, a broken connection while its gateway lived

The last two are unaccounted for. Faults are intervals; a request is under one when the two overlap. Of answers that
are read as they come the longest waits are kept: in all, and of each fault that they are under. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from math import inf
from typing import assert_never

import msgspec

from cohort.services.bench.chaos.answer_content import AnswerContent
from cohort.services.bench.chaos.exchange import Answered, Broken, Ending, Failed, Left, Refused, Replied, Silent

GATEWAY = "gateway"
ALL = "all"
"""The processes that a rolling restart is of."""
TOGETHER = "+"
"""Sign between the names of processes that one fault is of."""
REFUSALS = (429, 503)
_AFTER_S = 3.0
"""A gateway that is ready again may still hear nothing of a manager or worker that it just met."""
_MAX_LISTED = 200


class Verdict(StrEnum):
    RIGHT = "right"
    REFUSED = "refused"
    CUT = "cut"
    LEFT = "left"
    WRONG = "wrong"
    LOST = "lost"


class Waits(msgspec.Struct):
    """The longest of some answers: for the first event of a stream, and between two of one stream."""

    ttft_s: float = 0.0
    pause_s: float = 0.0


class Fault(msgspec.Struct):
    """Fault of a process, or of several (`decode-0+manager`): when all was whole again (None: not yet), and the waits
    of its clients until then. Seconds of the run."""

    process: str
    action: str
    at_s: float
    back_s: float | None = None
    waits: Waits = msgspec.field(default_factory=Waits)

    def hits(self, kind: str) -> bool:
        return self.process == ALL or any(is_of(name, kind) for name in self.process.split(TOGETHER))

    def during(self, from_s: float, to_s: float) -> bool:
        return self.at_s <= to_s and (self.back_s is None or self.back_s + _AFTER_S >= from_s)


class Unaccounted(msgspec.Struct, frozen=True):
    """A request that is not accounted for. `under`: the faults during its life."""

    kind: str
    verdict: Verdict
    from_s: float
    to_s: float
    detail: str
    under: list[str]


class Accounts:
    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.by_kind: dict[str, Counter[str]] = {}
        self.refusals: Counter[str] = Counter()
        self.unaccounted: list[Unaccounted] = []
        self.unaccounted_total = 0
        self.waits = Waits()
        self.resumed = 0
        """Streams that broke, were resumed, and ended."""

    def total(self, verdict: Verdict) -> int:
        return sum(each[verdict] for each in self.by_kind.values())

    @property
    def requests(self) -> int:
        return sum(each.total() for each in self.by_kind.values())

    def book(
        self, kind: str, from_s: float, to_s: float, ending: Ending, expected: AnswerContent | int | None
    ) -> Verdict:
        """Record one request's end. `expected`: the answer, a status, or None where any answer is right."""
        under = [fault for fault in self.faults if fault.during(from_s, to_s)]
        verdict, detail = judge(ending, expected, under)
        self.by_kind.setdefault(kind, Counter())[verdict] += 1
        if verdict is Verdict.REFUSED and isinstance(ending, Refused):
            self.refuse(ending)
        if verdict in (Verdict.WRONG, Verdict.LOST):
            self.unaccounted_total += 1
            if len(self.unaccounted) < _MAX_LISTED:
                names = [f"{fault.action} {fault.process}" for fault in under]
                self.unaccounted.append(Unaccounted(kind, verdict, from_s, to_s, detail, names))
        return verdict

    def refuse(self, ending: Refused) -> None:
        """Count a refusal, of a request that its client repeats, too."""
        self.refusals[f"{ending.status} {ending.message[:100]}"] += 1

    def time(self, from_s: float, events_s: Sequence[float]) -> None:
        """Record an answer's waits, from its request to its last event, for all and for the faults that they reach
        into."""
        spans = [(self.waits, 0.0, inf)]
        spans += [(fault.waits, fault.at_s, inf if fault.back_s is None else fault.back_s) for fault in self.faults]
        for longest, begin_s, end_s in spans:
            if from_s <= end_s and events_s[-1] >= begin_s:
                first, *others = (
                    later - sooner if sooner <= end_s and later >= begin_s else 0.0
                    for sooner, later in pairwise((from_s, *events_s))
                )
                longest.ttft_s, longest.pause_s = max(longest.ttft_s, first), max([longest.pause_s, *others])


def is_of(name: str, kind: str) -> bool:
    """Return whether a process is this one, or of this kind: `decode-0` is of `decode-0` and of `decode`."""
    return name == kind or name.startswith(f"{kind}-")


def judge(ending: Ending, expected: AnswerContent | int | None, under: Sequence[Fault]) -> tuple[Verdict, str]:
    """Return the verdict, and for a bad one what came instead."""
    gateway_down = any(fault.hits(GATEWAY) and fault.action != "stop" for fault in under)
    match ending:
        case Left():
            return Verdict.LEFT, ""
        case Answered(found) | Replied(found) if expected is None or found == expected:
            return Verdict.RIGHT, ""
        case Answered(content):
            return Verdict.WRONG, f"{content} instead of {expected}"[:4000]
        case Replied(status):
            return Verdict.WRONG, f"status {status} instead of {expected}"
        case Refused(status, message) if status == expected and message:
            return Verdict.RIGHT, ""
        case Refused(status, message) if message and (status == 429 or (status in REFUSALS and under)):
            return Verdict.REFUSED, ""
        case Refused(status, message):
            return Verdict.LOST, f"HTTP {status}: {message or 'no word of why'}"
        case Failed(message):
            return (Verdict.CUT if gateway_down else Verdict.LOST), f"error in the stream: {message}"
        case Broken(reason):
            return (Verdict.CUT if gateway_down else Verdict.LOST), reason
        case Silent():
            return Verdict.LOST, "no answer in time"
        case _:
            assert_never(ending)
