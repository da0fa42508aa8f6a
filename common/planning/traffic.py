"""The traffic of the last minutes as lengths and times, and whether a request was served in time.

Gateways tell a request twice: when it is admitted and when it ends. No text, no token, no id that a client chose.
Called by `machine.py`; `in_time` judges measured and simulated requests alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from cohort.common.types import InstanceId, Slo, TrafficClass

MOST_REQUESTS = 20_000
"""Number of remembered requests at most; the oldest go first."""
LEAD_IN = 0.15
"""Share of the replayed time whose requests are not judged: what was under way at its start is known roughly."""
_LONGEST_S = 600.0
"""A request that is open for longer than this before the replay is left out of it."""
_LEAST_TO_GROW = 20
"""Requests without which a rise says nothing."""
_MOST_GROWTH = 2.0


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Seconds from arrival to the first token, between later ones, from arrival to the last; below 0: never came."""

    ttft_s: float = -1.0
    tpot_s: float = -1.0
    e2e_s: float = -1.0


class TrafficRecord(msgspec.Struct, frozen=True, array_like=True):
    """One request of a gateway, by its own count. `age_s`: since it arrived. `output_tokens` and `timing` once it has
    ended; `cancelled`: by its client, so its times judge nothing. `cached_tokens` of its prompt were in the prefix
    cache."""

    number: int
    age_s: float
    prompt_tokens: int
    traffic_class: TrafficClass = "rt"
    slo: Slo = Slo()
    output_tokens: int = 0
    cached_tokens: int = 0
    timing: Timing | None = None
    cancelled: bool = False


class Replayed(msgspec.Struct, frozen=True, array_like=True):
    """A request to simulate; `at_s` since the first one. `shared_tokens` begin as those of all others do."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    traffic_class: TrafficClass = "rt"
    slo: Slo = Slo()
    shared_tokens: int = 0


class Seen(msgspec.Struct, frozen=True):
    """A request as it is remembered; `arrived_s` on the host's clock."""

    arrived_s: float
    record: TrafficRecord

    @property
    def judged(self) -> bool:
        return self.record.timing is not None and not self.record.cancelled

    def overdue(self, at_s: float, answer_s: float) -> bool:
        """Return whether an open request must be late: its first token was late if it came at all, as no known answer
        takes longer than `answer_s`. In an overload such requests are all there is to judge by."""
        slo_s = self.record.slo.ttft_s
        return self.record.timing is None and bool(slo_s and answer_s) and at_s - self.arrived_s > slo_s + answer_s

    def ends_after(self, at_s: float) -> bool:
        """Return whether a request was open at `at_s`. One that failed counts as ended: nothing is known of it."""
        timing = self.record.timing
        return timing is None or self.arrived_s + timing.e2e_s > at_s

    def share_by(self, at_s: float) -> float:
        """Return the share of the answer that had been generated at `at_s`, at an even pace."""
        timing = self.record.timing
        if timing is None or timing.ttft_s < 0.0 or timing.e2e_s <= timing.ttft_s:
            return 0.0
        since_s = at_s - self.arrived_s - timing.ttft_s
        return min(1.0, max(0.0, since_s / (timing.e2e_s - timing.ttft_s)))


def longest_answer_s(seen: Iterable[Seen]) -> float:
    """Return the longest time from first to last token of those that ended; 0 without any."""
    timings = [each.record.timing for each in seen if each.judged]
    return max([timing.e2e_s - timing.ttft_s for timing in timings if timing and timing.ttft_s >= 0.0], default=0.0)


class Replay(msgspec.Struct, frozen=True):
    """`seen` in order of arrival: those that were under way at `start_s`, then the latest. `growth`: how many times as
    dense the next ones are expected to come."""

    start_s: float
    seen: tuple[Seen, ...]
    growth: float = 1.0


def load_of(requests: Sequence[Replayed]) -> float:
    """Return the prompt and output tokens a second; 0 where all requests arrive at once."""
    over_s = requests[-1].at_s - requests[0].at_s if requests else 0.0
    return sum(each.prompt_tokens + each.output_tokens for each in requests) / over_s if over_s else 0.0


def in_time(slo: Slo, timing: Timing, best_effort_s: float) -> bool:
    """Return whether every objective was met, or, without any, the request ended within `best_effort_s`."""
    if timing.e2e_s < 0.0:
        return False
    if not (slo.ttft_s or slo.tpot_s or slo.deadline_s):
        return timing.e2e_s <= best_effort_s
    late = (slo.ttft_s and not 0.0 <= timing.ttft_s <= slo.ttft_s) or (slo.tpot_s and timing.tpot_s > slo.tpot_s)
    return not (late or (slo.deadline_s and timing.e2e_s > slo.deadline_s))


def growth(arrived_s: Sequence[float], now_s: float, over_s: float, since_s: float, ahead_s: float) -> float:
    """Estimate how many times as dense as between `since_s` and `now_s` requests come `ahead_s` from now, at least 1.

    The arrivals of the last `over_s` seconds are taken for a Poisson process whose rate is a straight line,

        rate(x) = mean · (1 + slope · (x - 1/2)),  x = 0 at the beginning, 1 now;  E[mean of x] = 1/2 + slope / 12

    and of the slope so found one standard error is taken off: what may be chance is no growth.
    """
    shares = [1.0 - (now_s - each) / over_s for each in arrived_s if each > now_s - over_s]
    if len(shares) < _LEAST_TO_GROW:
        return 1.0
    lean = sum(shares) / len(shares) - 0.5
    slope = min(2.0, 12.0 * max(0.0, lean - 1.0 / math.sqrt(12.0 * len(shares))))
    replayed = 1.0 + slope * (0.5 - 0.5 * min(over_s, now_s - since_s) / over_s)
    return min(_MOST_GROWTH, (1.0 + slope * (0.5 + ahead_s / over_s)) / replayed)


class TrafficWindow:
    def __init__(self, window_s: float, most: int) -> None:
        """`most`: requests that are replayed, the latest ones."""
        self._window_s = window_s
        self._most = most
        self._seen: dict[tuple[InstanceId, int, int], Seen] = {}

    def note(self, now_s: float, gateway: InstanceId, incarnation: int, records: Iterable[TrafficRecord]) -> None:
        for record in records:
            key = (gateway, incarnation, record.number)
            known = self._seen.get(key)
            arrived_s = now_s - record.age_s if known is None else known.arrived_s
            self._seen[key] = Seen(arrived_s, record)
        while len(self._seen) > MOST_REQUESTS:
            del self._seen[next(iter(self._seen))]

    def latest(self, now_s: float, ahead_s: float = 0.0) -> Replay:
        """Return the latest requests, and those open when the first of them came; older ones are forgotten. `ahead_s`:
        how far ahead growth is estimated; 0: not at all."""
        ordered = sorted(self._seen.items(), key=lambda item: item[1].arrived_s)
        recent = [seen for _, seen in ordered if seen.arrived_s >= now_s - self._window_s][-self._most :]
        start_s = recent[0].arrived_s if recent else now_s
        backlog = [seen for _, seen in ordered if seen.arrived_s < start_s and seen.ends_after(start_s)]
        backlog = [seen for seen in backlog if seen.arrived_s >= start_s - _LONGEST_S][-self._most :]
        oldest_s = min(start_s, now_s - self._window_s) - _LONGEST_S
        self._seen = {key: seen for key, seen in ordered if seen.arrived_s >= oldest_s}
        rise = 1.0
        if ahead_s:
            rise = growth([seen.arrived_s for _, seen in ordered], now_s, self._window_s, start_s, ahead_s)
        return Replay(start_s, (*backlog, *recent), rise)


def to_replay(replay: Replay, default_output: int) -> list[Replayed]:
    """Make requests to simulate. An open one gets the mean length of those of its class that ended, else
    `default_output`. One that was open at the start arrives then, with the rest of its answer."""
    ended: dict[TrafficClass, list[int]] = {}
    for each in replay.seen:
        if each.judged:
            ended.setdefault(each.record.traffic_class, []).append(each.record.output_tokens)

    def output(record: TrafficRecord) -> int:
        if record.timing is not None:
            return max(1, record.output_tokens)
        known = ended.get(record.traffic_class)
        return max(1, sum(known) // len(known) if known else default_output)

    found = []
    for each in replay.seen:
        record, tokens = each.record, output(each.record)
        done = min(tokens - 1, round(tokens * each.share_by(replay.start_s)))
        found.append(
            Replayed(
                max(0.0, each.arrived_s - replay.start_s) / replay.growth,
                record.prompt_tokens + done,
                tokens - done,
                record.traffic_class,
                record.slo,
                min(record.cached_tokens, record.prompt_tokens - 1),
            )
        )
    return found
