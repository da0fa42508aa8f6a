"""The gateway's part of a simulation: requests arrive, are admitted and predicted; their tokens become figures.

It knows what no policy may know: how long every answer really is. Requests carry a stop token and the client's
`max_tokens` like live ones; the model's draw (`draw`) is the stop token exactly at the true length. What has
ended is forgotten, so memory holds what is in flight and the histograms, however long the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from random import Random
from typing import Literal

from cohort.common.machines.events import Sampled
from cohort.common.messages import ClusterLoad, Displaced, Refused, TokenUpdate
from cohort.common.policies.interface import Admission, AdmissionLoad, Offer, Refuse, Row
from cohort.common.types import Attempt, Prediction, Request, SamplingParams
from cohort.common.workloads.items import WorkItem
from cohort.services.simulator.statistics import Histogram

OUTPUT_TOKEN, STOP_TOKEN = 1, 2
_FIRST_PROMPT_TOKEN = 16

PredictorKind = Literal["oracle", "noisy", "lognormal", "none"]
"""The true length; with normal errors of `sigma` tokens; with errors by a log-normal factor of `sigma`; silence."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A request on its way: what its gateway knows."""

    item: WorkItem
    index: int
    output_tokens: int
    answered: Callable[[float], None] | None
    attempt: int = 1
    produced: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    longest_gap_s: float = 0.0
    gaps_within: int = 0


@dataclass(slots=True)
class ClassFigures:
    """Everything about the requests of one class, or (`absorb`) of several."""

    sent: int = 0
    finished: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    promised: int = 0
    """Finished or refused requests that had a promise."""
    kept: int = 0
    kept_ttft: int = 0
    kept_tpot: int = 0
    kept_deadline: int = 0
    kept_output_tokens: int = 0
    tokens_within_tbt: int = 0
    promised_output_tokens: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    tbt: Histogram = field(default_factory=Histogram)
    jct: Histogram = field(default_factory=Histogram)
    normalised: Histogram = field(default_factory=Histogram)

    def absorb(self, other: ClassFigures) -> None:
        for entry in fields(self):
            mine, theirs = getattr(self, entry.name), getattr(other, entry.name)
            if isinstance(mine, Histogram):
                mine.absorb(theirs)
            elif isinstance(mine, dict):
                for reason, count in theirs.items():
                    mine[reason] = mine.get(reason, 0) + count
            else:
                setattr(self, entry.name, mine + theirs)


class SimGateway:
    def __init__(
        self,
        *,
        name: str,
        admission: Admission,
        max_model_len: int,
        max_tokens: int,
        predictor: PredictorKind,
        predictor_sigma: float,
        distinct_prompts: bool,
        seed: int,
    ) -> None:
        self.name = name
        self.classes: dict[str, ClassFigures] = {}
        self.live: dict[str, InFlight] = {}
        self.first_arrival_s = math.inf
        self.last_end_s = 0.0
        self.clipped_outputs = 0
        self.resubmitted = 0
        self.load: ClusterLoad | None = None
        self._admission = admission
        self._max_model_len = max_model_len
        self._max_tokens = max_tokens
        self._predictor = predictor
        self._sigma = predictor_sigma
        self._distinct = distinct_prompts
        self._random = Random(seed)
        self._count = 0

    @property
    def all(self) -> ClassFigures:
        """The figures of all classes together."""
        together = ClassFigures()
        for figures in self.classes.values():
            together.absorb(figures)
        return together

    def begin_counting(self, now_s: float) -> None:
        """Forget the figures so far, not the requests."""
        self.classes = {name: ClassFigures() for name in self.classes}
        self.first_arrival_s = now_s

    # -- requests ----------------------------------------------------------------------------------------------

    def arrive(self, now_s: float, item: WorkItem, answered: Callable[[float], None] | None) -> Request | None:
        """The request to submit, or None when the door refuses it."""
        index = self._count
        self._count += 1
        self.first_arrival_s = min(self.first_arrival_s, now_s)
        self._class(item).sent += 1
        room = self._max_model_len - item.prompt_tokens
        if room < 1:
            self._refused(now_s, item, "the prompt exceeds the model's context", answered)
            return None
        output = min(item.output_tokens, room)
        self.clipped_outputs += output < item.output_tokens
        cap = room if self._max_tokens == 0 else min(room, max(self._max_tokens, output))
        prediction = self._predict(output, cap)
        refusal = self._admit(now_s, item, cap, prediction)
        if refusal is not None:
            self._refused(now_s, item, refusal.reason.lstrip("0123456789 "), answered)
            return None
        live = InFlight(item, index, output, answered)
        name = f"r{index}"
        self.live[name] = live
        return self._request(now_s, name, live, cap, prediction)

    def again(self, now_s: float, message: Displaced) -> list[Request]:
        """What was lost is submitted again with the tokens so far, as a live gateway does."""
        requests = []
        for attempt in message.attempts:
            live = self.live.get(attempt.request_id)
            if live is not None and live.attempt == attempt.number:
                live.attempt += 1
                self.resubmitted += 1
                room = self._max_model_len - live.item.prompt_tokens
                requests.append(self._request(now_s, attempt.request_id, live, room, None))
        return requests

    def refused(self, now_s: float, message: Refused) -> None:
        live = self.live.pop(message.attempt.request_id, None)
        if live is not None:
            self._refused(now_s, live.item, message.reason, live.answered)

    def _request(self, now_s: float, name: str, live: InFlight, cap: int, prediction: Prediction | None) -> Request:
        item = live.item
        tokens = self._prompt(live) + [OUTPUT_TOKEN] * live.produced
        return Request(
            attempt=Attempt(name, live.attempt),
            gateway=self.name,
            tokens=tokens,
            prompt_tokens=item.prompt_tokens,
            sampling=SamplingParams(max_tokens=cap, stop_token_ids=(STOP_TOKEN,)),
            arrival_s=now_s,
            traffic_class=item.traffic_class,
            online=item.traffic_class == "rt",
            slo=item.slo,
            prediction=prediction,
        )

    def _prompt(self, live: InFlight) -> list[int]:
        """Token ids that are equal exactly where prompts share a prefix. Numbers alone matter when nothing can be
        shared."""
        item = live.item
        if not self._distinct:
            return [0] * item.prompt_tokens
        if item.hash_ids:
            tokens: list[int] = []
            for block in item.hash_ids:
                tokens += [_FIRST_PROMPT_TOKEN + block] * item.hash_block
            tokens += [-1 - live.index] * (item.prompt_tokens - len(tokens))
            return tokens[: item.prompt_tokens]
        # Sessions share their beginning; anybody else nothing.
        own = hash_of(item.session) if item.session else -1 - live.index
        return [own] * item.prompt_tokens

    def _predict(self, output: int, cap: int) -> Prediction | None:
        if self._predictor == "none":
            return None
        mean = float(output)
        if self._predictor == "noisy":
            mean = min(float(cap), max(1.0, self._random.gauss(mean, self._sigma)))
        elif self._predictor == "lognormal":
            mean = min(float(cap), max(1.0, mean * math.exp(self._random.gauss(0.0, self._sigma))))
        return Prediction(mean, mean, mean, mean, self._predictor)

    def _admit(self, now_s: float, item: WorkItem, cap: int, prediction: Prediction | None) -> Refuse | None:
        load = self.load
        decision = self._admission.decide(
            now_s,
            Offer(
                item.prompt_tokens, cap, prediction.mean if prediction else float(cap), item.traffic_class, 0, item.slo
            ),
            AdmissionLoad(
                waiting_requests=load.waiting if load else 0,
                waiting_tokens=load.waiting_tokens if load else 0,
                running_requests=len(self.live) - (load.waiting if load else 0),
                drain_rate=load.drain_rate if load else 0.0,
                free_tokens=load.free_tokens if load else 0,
                total_tokens=load.total_tokens if load else 0,
            ),
        )
        return decision if isinstance(decision, Refuse) else None

    # -- tokens ------------------------------------------------------------------------------------------------

    def draw(self, rows: Iterable[Row]) -> list[Sampled]:
        """What the model draws for the rows of an iteration that reach their last known token."""
        drawn = []
        for row in rows:
            sequence = row.sequence
            known = len(sequence.tokens)
            if row.start + row.count == known:
                request = sequence.request
                live = self.live.get(request.request_id)
                if live is not None:
                    last = known + 1 - request.prompt_tokens >= live.output_tokens
                    drawn.append(Sampled(sequence.key, STOP_TOKEN if last else OUTPUT_TOKEN))
        return drawn

    def fewest_left(self, rows: Iterable[Row]) -> int:
        """Output tokens that are still to be drawn, of the row that has fewest left."""
        return min(
            [self.live[row.sequence.request.request_id].output_tokens - row.sequence.output_tokens for row in rows]
        )

    def tokens(self, now_s: float, updates: Iterable[TokenUpdate]) -> None:
        for update in updates:
            live = self.live.get(update.attempt.request_id)
            if live is None or live.attempt != update.attempt.number:
                continue
            fresh = update.position + len(update.tokens) - live.item.prompt_tokens - live.produced
            for _ in range(fresh):
                self._token(now_s, live)
            if update.finish is not None:
                del self.live[update.attempt.request_id]
                self._finished(now_s, live)

    def _token(self, now_s: float, live: InFlight) -> None:
        if live.produced == 0:
            live.first_s = now_s
        else:
            gap_s = now_s - live.last_s
            self._gap(live, gap_s)
            if gap_s > live.longest_gap_s:
                live.longest_gap_s = gap_s
        live.produced += 1
        live.last_s = now_s

    def _gap(self, live: InFlight, gap_s: float) -> None:
        limit_s = live.item.slo.tpot_s
        if not limit_s or gap_s <= limit_s:
            live.gaps_within += 1
        self.classes[live.item.traffic_class].tbt.add(gap_s)

    def repeated(self, rows: Iterable[Row], ends_s: Sequence[float]) -> None:
        """The tokens of iterations that were run as one: a token for each row at each of these times."""
        gaps = [after - before for before, after in itertools.pairwise(ends_s)]
        longest = max(gaps, default=0.0)
        within: dict[float, int] = {}
        rows_of: dict[str, int] = {}
        first_s, last_s, count = ends_s[0], ends_s[-1], len(ends_s)
        for row in rows:
            live = self.live[row.sequence.request.request_id]
            self._gap(live, first_s - live.last_s)
            live.longest_gap_s = max(live.longest_gap_s, first_s - live.last_s, longest)
            limit_s = live.item.slo.tpot_s
            if limit_s not in within:
                within[limit_s] = sum(1 for gap in gaps if gap <= limit_s) if limit_s else len(gaps)
            live.gaps_within += within[limit_s]
            live.produced += count
            live.last_s = last_s
            name = live.item.traffic_class
            rows_of[name] = rows_of.get(name, 0) + 1
        for group, number in rows_of.items():
            histogram = self.classes[group].tbt
            for gap in gaps:
                histogram.add(gap, number)

    # -- endings -----------------------------------------------------------------------------------------------

    def _finished(self, now_s: float, live: InFlight) -> None:
        item, slo = live.item, live.item.slo
        self.last_end_s = max(self.last_end_s, now_s)
        ttft_s = live.first_s - item.arrival_s
        jct_s = live.last_s - item.arrival_s
        tpot_s = (live.last_s - live.first_s) / (live.produced - 1) if live.produced > 1 else 0.0
        kept_ttft = not slo.ttft_s or ttft_s <= slo.ttft_s
        kept_tpot = not slo.tpot_s or tpot_s <= slo.tpot_s
        kept_deadline = not slo.deadline_s or jct_s <= slo.deadline_s
        promised = bool(slo.ttft_s or slo.tpot_s or slo.deadline_s)
        each = self._class(item)
        each.finished += 1
        each.prompt_tokens += item.prompt_tokens
        each.output_tokens += live.produced
        if promised:
            each.promised += 1
            each.kept_ttft += kept_ttft
            each.kept_tpot += kept_tpot
            each.kept_deadline += kept_deadline
            each.tokens_within_tbt += live.gaps_within + kept_ttft
            each.promised_output_tokens += live.produced
            if kept_ttft and kept_tpot and kept_deadline:
                each.kept += 1
                each.kept_output_tokens += live.produced
        each.ttft.add(ttft_s)
        each.jct.add(jct_s)
        each.normalised.add(jct_s / live.produced)
        if live.produced > 1:
            each.tpot.add(tpot_s)
        if live.answered is not None:
            live.answered(now_s)

    def _refused(self, now_s: float, item: WorkItem, reason: str, answered: Callable[[float], None] | None) -> None:
        slo = item.slo
        each = self._class(item)
        each.refused[reason] = each.refused.get(reason, 0) + 1
        each.promised += bool(slo.ttft_s or slo.tpot_s or slo.deadline_s)
        if answered is not None:
            answered(now_s)

    def _class(self, item: WorkItem) -> ClassFigures:
        name = item.traffic_class
        if name not in self.classes:
            self.classes[name] = ClassFigures()
        return self.classes[name]


def hash_of(text: str) -> int:
    """A number for a session's name, the same in every run (Python's own hash is not)."""
    value = 1469598103934665603
    for byte in text.encode():
        value = (value ^ byte) * 1099511628211 & 0x3FFF_FFFF_FFFF_FFFF
    return value
