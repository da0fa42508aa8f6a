"""The clients of a simulation: requests arrive at the gateway from a trace; the tokens that come back become metrics.

They know what no policy may know: how long every answer really is. Requests carry a stop token and the client's
`max_tokens` like live ones; the model samples (`sample`) the stop token exactly at the true length. An ended request is
forgotten, so memory holds requests in flight and the histograms, however long the run.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from random import Random

import msgspec

from cohort.common.machines.effects import Admitted, Deliver, Ended, Fail, GatewayEffect, ManagerFound, Rejected
from cohort.common.machines.events import Drafted, Offered, Received, Sampled
from cohort.common.messages import Message, TokenBatch, TokenUpdate
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Row
from cohort.common.types import Attempt, DraftSource, Prediction, Request, SamplingParams
from cohort.common.virtual_cluster.cluster import GATEWAY, VirtualCluster
from cohort.common.virtual_cluster.plugins import Node
from cohort.common.workloads.items import WorkItem
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.core.statistics import Histogram
from cohort.services.simulator.hardware.acceptance import Acceptance

OUTPUT_TOKEN, STOP_TOKEN = 1, 2
_FIRST_PROMPT_TOKEN = 16


@dataclass(slots=True, eq=False)
class InFlight:
    item: WorkItem
    index: int
    output_tokens: int
    answered: Callable[[float], None] | None
    produced: int = 0
    first_s: float = 0.0
    second_s: float = 0.0
    last_s: float = 0.0
    gaps_within: int = 0

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (self.produced - 1) if self.produced > 1 else 0.0

    @property
    def attained(self) -> tuple[bool, bool, bool]:
        """Whether a finished request kept TTFT, TPOT and deadline of its SLO; what the SLO lacks is kept."""
        slo, since_s = self.item.slo, self.item.arrival_s
        return (
            not slo.ttft_s or self.first_s - since_s <= slo.ttft_s,
            not slo.tpot_s or self.tpot_s <= slo.tpot_s,
            not slo.deadline_s or self.last_s - since_s <= slo.deadline_s,
        )


@dataclass(slots=True)
class ClassStats:
    """Statistics of the requests of one class, or (`absorb`) of several."""

    sent: int = 0
    finished: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    with_slo: int = 0
    """Number of finished or refused requests that had an SLO."""
    attained: int = 0
    attained_ttft: int = 0
    attained_tpot: int = 0
    attained_deadline: int = 0
    attained_output_tokens: int = 0
    tokens_within_tbt: int = 0
    without_late_gap: int = 0
    slo_output_tokens: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    second: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    tbt: Histogram = field(default_factory=Histogram)
    jct: Histogram = field(default_factory=Histogram)
    normalised: Histogram = field(default_factory=Histogram)

    def absorb(self, other: ClassStats) -> None:
        for entry in fields(self):
            mine, theirs = getattr(self, entry.name), getattr(other, entry.name)
            if isinstance(mine, Histogram):
                mine.absorb(theirs)
            elif isinstance(mine, dict):
                for reason, count in theirs.items():
                    mine[reason] = mine.get(reason, 0) + count
            else:
                setattr(self, entry.name, mine + theirs)


@dataclass(slots=True)
class _Run:
    """Steps run as one: the true time of each row's tokens, and the gaps between them."""

    times_s: list[float]
    gaps_s: list[float]
    rows_of: dict[str, int] = field(default_factory=dict)
    """Rows delivered so far, by class."""
    _within: dict[float, int] = field(default_factory=dict)

    def within(self, limit_s: float) -> int:
        """Return the number of gaps within the limit; 0 = no limit."""
        if limit_s not in self._within:
            self._within[limit_s] = sum(1 for gap in self.gaps_s if gap <= limit_s) if limit_s else len(self.gaps_s)
        return self._within[limit_s]


class TraceClients:
    def __init__(
        self,
        virtual: VirtualCluster,
        options: SimOptions,
        *,
        max_model_len: int,
        distinct_prompts: bool,
        acceptance: Acceptance,
        uses_draft_model: bool,
    ) -> None:
        """`acceptance`: of drafts. `uses_draft_model`: a model makes the drafts, on request."""
        self.classes: defaultdict[str, ClassStats] = defaultdict(ClassStats)
        self.live: dict[str, InFlight] = {}
        self.first_arrival_s = math.inf
        self.last_end_s = 0.0
        self.clipped_outputs = 0
        self._virtual = virtual
        self._events = virtual.events
        self._max_model_len = max_model_len
        self._max_tokens = options.max_tokens
        self._predictor = options.predictor
        self._sigma = options.predictor_sigma
        self._distinct = distinct_prompts
        self._if_late = options.if_late
        self._random = Random(options.seed)
        self._acceptance = acceptance
        self._uses_draft_model = uses_draft_model
        self._count = 0
        self._under_way: deque[tuple[Node, list[TokenUpdate], list[float]]] = deque()
        """Tokens of steps run as one that the gateway has not received yet."""
        self.on_end: Callable[[InFlight, bool], None] = lambda live, finished: None
        """Callback of every request that ends, with whether its answer is complete."""
        self._run: _Run | None = None
        """Steps run as one whose tokens are being delivered; None otherwise."""

    @property
    def all(self) -> ClassStats:
        together = ClassStats()
        for stats in self.classes.values():
            together.absorb(stats)
        return together

    def unserved_with_slo(self, traffic_class: str = "") -> int:
        """Count the open requests with an SLO, of one class or ("") all."""
        items = [live.item for live in self.live.values()]
        return sum(has_slo(item) for item in items if traffic_class in ("", item.traffic_class))

    def normalised_to_end_s(self, stats: ClassStats, traffic_class: str, end_s: float) -> float | None:
        """Return mean seconds a token of a class, "" all; open requests as if they ended now. None without any."""
        live = [live for live in self.live.values() if traffic_class in ("", live.item.traffic_class)]
        if not stats.normalised.count + len(live):
            return None
        unserved_s = sum((end_s - one.item.arrival_s) / one.output_tokens for one in live)
        return (stats.normalised.sum_s + unserved_s) / (stats.normalised.count + len(live))

    def begin_counting(self, now_s: float) -> None:
        """Forget the statistics so far, not the requests."""
        for name in self.classes:
            self.classes[name] = ClassStats()
        self.first_arrival_s = now_s

    # -- requests ----------------------------------------------------------------------------------------------

    def arrive(self, now_s: float, item: WorkItem, answered: Callable[[float], None] | None) -> None:
        """Send a request. One that the model's context cannot hold is refused, as the HTTP side does."""
        index = self._count
        self._count += 1
        self.first_arrival_s = min(self.first_arrival_s, now_s)
        self.classes[item.traffic_class].sent += 1
        headroom = self._max_model_len - item.prompt_tokens
        if headroom < 1:
            self._refused(now_s, item, "the prompt exceeds the model's context", answered)
            return
        output = min(item.output_tokens, headroom)
        self.clipped_outputs += output < item.output_tokens
        cap = headroom if self._max_tokens == 0 else min(headroom, max(self._max_tokens, output))
        prediction = self._predict(output, cap)
        name, live = f"r{index}", InFlight(item, index, output, answered)
        self.live[name] = live
        request = Request(
            attempt=Attempt(name, 0),
            gateway=GATEWAY,
            tokens=self._prompt(live),
            prompt_tokens=item.prompt_tokens,
            sampling=SamplingParams(max_tokens=cap, stop_token_ids=(STOP_TOKEN,)),
            arrival_s=now_s,
            traffic_class=item.traffic_class,
            online=item.traffic_class == "rt",
            slo=item.slo,
            prediction=prediction,
            if_late=self._if_late if item.slo.ttft_s else "",
            adapter=item.adapter,
        )
        self._virtual.feed(self._virtual.nodes[GATEWAY], Offered(name, [request]))

    def _prompt(self, live: InFlight) -> list[int]:
        """Make token ids that are equal exactly where prompts share a prefix; else only their number counts."""
        item = live.item
        if not self._distinct:
            return [0] * item.prompt_tokens
        if item.hash_ids:
            tokens: list[int] = []
            for block in item.hash_ids:
                tokens += [_FIRST_PROMPT_TOKEN + block] * item.hash_block
            tokens += [-1 - live.index] * (item.prompt_tokens - len(tokens))
            return tokens[: item.prompt_tokens]
        # Sessions share their beginning; no other requests share anything.
        own = hash_of(item.session) if item.session else -1 - live.index
        return [own] * item.prompt_tokens

    def _predict(self, output: int, cap: int) -> Prediction | None:
        """Predict the output length; None without a predictor."""
        if self._predictor == "none":
            return None
        mean = float(output)
        if self._predictor == "noisy":
            mean = min(float(cap), max(1.0, self._random.gauss(mean, self._sigma)))
        elif self._predictor == "lognormal":
            mean = min(float(cap), max(1.0, mean * math.exp(self._random.gauss(0.0, self._sigma))))
        return Prediction(mean, mean, mean, mean, self._predictor)

    def send_to_predictor(self, gateway: Node, message: Message) -> None:
        """Ignore the message: requests bring their predictions, and this predictor learns nothing."""

    # -- what the gateway says -------------------------------------------------------------------------------------

    def on_effect(self, gateway: Node, effect: GatewayEffect) -> None:
        if isinstance(effect, Deliver):  # nearly all of them
            name = effect.entry.attempt.request_id
            live = self.live[name]
            if effect.tokens:
                if self._run is None:
                    self._tokens(self._events.now_s, live, len(effect.tokens))
                else:
                    self._repeated(live, self._run)
            if effect.finish is not None:
                del self.live[name]
                self._finished(self._events.now_s, live)
                self.on_end(live, True)
            return
        match effect:
            case Rejected(offer_id, error):
                self._turned_away(offer_id, error.message)
            case Fail(entry, error):
                # A forecast differs from request to request.
                self._turned_away(entry.request_id, entry.refused_because if entry.forecast_s else error.message)
            case Admitted() | Ended() | ManagerFound():
                pass
            case _:
                raise TypeError(f"not for a client: {effect}")

    def _turned_away(self, name: str, reason: str) -> None:
        live = self.live.pop(name)
        self.on_end(live, False)
        self._refused(self._virtual.now_s, live.item, reason, live.answered)

    # -- tokens ----------------------------------------------------------------------------------------------------

    def proposed(self, row: Row) -> int:
        """Return the number of drafts of a row: all that it may carry, if something is expected."""
        if not row.drafts:
            return 0
        live = self.live.get(row.sequence.request_id)
        return row.drafts if live is not None and self._expects(live, row) else 0

    def drafted(self, plan: IterationPlan) -> list[Drafted]:
        """Judge the drafts of a step, and what a look-up expected of rows without any."""
        if not self._acceptance or not plan.watched:
            return []
        judged = list[Drafted]()
        source: DraftSource = "model" if self._uses_draft_model else "lookup"
        for row in plan.rows:
            sequence, live = row.sequence, self.live.get(row.sequence.request_id)
            known = len(sequence.tokens)
            if live is None or row.start + 1 != known or row.count != 1 or sequence.output_tokens < 1:
                continue
            if not self._expects(live, row) or (self._uses_draft_model and not row.drafts):
                continue
            # The answer's last token is the end token, which no draft has.
            remaining = max(0, live.output_tokens - sequence.output_tokens - 1)
            right = min(remaining, self._acceptance.right(live.index, known, max(1, row.drafts)))
            judged.append(Drafted(sequence.key, max(1, row.drafts), right, computed=row.drafts > 0, source=source))
        return judged

    def _expects(self, live: InFlight, row: Row) -> bool:
        return bool(self._acceptance) and self._acceptance.expects(live.index, row.start + 1)

    def sample(self, rows: Iterable[Row], drafted: Iterable[Drafted] = ()) -> list[Sampled]:
        """Sample the tokens of rows that reach their last known token, and of right drafts."""
        sampled, all_live = [], self.live
        more = {each.attempt: each.right for each in drafted if each.computed}
        for row in rows:
            sequence = row.sequence
            known = len(sequence.tokens)
            if row.start + row.count == known:
                key = sequence.key
                live = all_live.get(key.request_id)
                last = live is not None and known + 1 - sequence.request.prompt_tokens >= live.output_tokens
                sampled.append(Sampled(key, STOP_TOKEN if last else OUTPUT_TOKEN))
                for count in range(1, more.get(key, 0) + 1) if more else ():
                    last = live is not None and sequence.output_tokens + 1 + count >= live.output_tokens
                    sampled.append(Sampled(key, STOP_TOKEN if last else OUTPUT_TOKEN))
        return sampled

    def fewest_remaining(self, rows: Iterable[Row]) -> int:
        """Return how many output tokens the row with fewest of them still samples."""
        return min([self.live[row.sequence.request_id].output_tokens - row.sequence.output_tokens for row in rows])

    def _tokens(self, now_s: float, live: InFlight, count: int) -> None:
        produced = live.produced
        if count == 1 and produced > 1:  # nearly always: `_gap` written out
            gap_s, item = now_s - live.last_s, live.item
            limit_s = item.slo.tpot_s
            if not limit_s or gap_s <= limit_s:
                live.gaps_within += 1
            self.classes[item.traffic_class].tbt.add(gap_s)
            live.produced, live.last_s = produced + 1, now_s
            return
        if produced:
            self._gap(live, now_s - live.last_s)
        else:
            live.first_s = now_s
        if produced < 2 <= produced + count:
            live.second_s = now_s
        if count > 1:
            for _ in range(count - 1):
                self._gap(live, 0.0)
        live.produced = produced + count
        live.last_s = now_s

    def _gap(self, live: InFlight, gap_s: float) -> None:
        limit_s = live.item.slo.tpot_s
        if not limit_s or gap_s <= limit_s:
            live.gaps_within += 1
        self.classes[live.item.traffic_class].tbt.add(gap_s)

    def repeated(self, worker: Node, rows: Iterable[Row], times_s: list[float], at_s: float) -> None:
        """Take the tokens of steps run as one: one of each row at each of these times. The gateway gets them together,
        `at_s`. `rows`: of the step that follows, whose sequences hold those tokens."""
        count = len(times_s)
        tokens, first = [OUTPUT_TOKEN] * count, 1 - count
        updates = [TokenUpdate(row.sequence.key, row.start + first, tokens) for row in rows]
        self._under_way.append((worker, updates, times_s))
        self._virtual.events.at(at_s, self._deliver_next)

    def end_at(self, horizon_s: float) -> None:
        """End the run. Tokens that would have come together later come now, if their own time is within the horizon."""
        while self._under_way:
            worker, updates, times_s = self._under_way.popleft()
            count = bisect_right(times_s, horizon_s)
            if count:
                received = [msgspec.structs.replace(update, tokens=update.tokens[:count]) for update in updates]
                self._deliver_repeated(worker, TokenBatch(worker.name, received), times_s[:count])

    def _deliver_next(self) -> None:
        worker, updates, times_s = self._under_way.popleft()  # all travel equally long: in the order they were sent
        self._deliver_repeated(worker, TokenBatch(worker.name, updates), times_s)

    def _deliver_repeated(self, worker: Node, batch: TokenBatch, times_s: list[float]) -> None:
        self._run = run = _Run(times_s, [after - before for before, after in itertools.pairwise(times_s)])
        self._virtual.feed(self._virtual.nodes[GATEWAY], Received(worker.name, batch))
        self._run = None
        for group, number in run.rows_of.items():
            histogram = self.classes[group].tbt
            for gap in run.gaps_s:
                histogram.add(gap, number)

    def _repeated(self, live: InFlight, run: _Run) -> None:
        """Count a token at each of these times. Gaps between them are counted for all rows together, afterwards."""
        item = live.item
        first_gap_s = run.times_s[0] - live.last_s
        self._gap(live, first_gap_s)
        live.gaps_within += run.within(item.slo.tpot_s)
        if live.produced == 1:
            live.second_s = run.times_s[0]
        live.produced += len(run.times_s)
        live.last_s = run.times_s[-1]
        run.rows_of[item.traffic_class] = run.rows_of.get(item.traffic_class, 0) + 1

    # -- endings -----------------------------------------------------------------------------------------------

    def _finished(self, now_s: float, live: InFlight) -> None:
        item = live.item
        self.last_end_s = max(self.last_end_s, now_s)
        ttft_s = live.first_s - item.arrival_s
        jct_s = live.last_s - item.arrival_s
        attained_ttft, attained_tpot, attained_deadline = live.attained
        each = self.classes[item.traffic_class]
        each.finished += 1
        each.prompt_tokens += item.prompt_tokens
        each.output_tokens += live.produced
        if has_slo(item):
            each.with_slo += 1
            each.attained_ttft += attained_ttft
            each.attained_tpot += attained_tpot
            each.attained_deadline += attained_deadline
            each.tokens_within_tbt += live.gaps_within + attained_ttft
            each.slo_output_tokens += live.produced
            each.without_late_gap += live.gaps_within >= live.produced - 1
            if attained_ttft and attained_tpot and attained_deadline:
                each.attained += 1
                each.attained_output_tokens += live.produced
        each.ttft.add(ttft_s)
        each.jct.add(jct_s)
        each.normalised.add(jct_s / live.produced)
        if live.produced > 1:
            each.tpot.add(live.tpot_s)
            each.second.add(live.second_s - item.arrival_s)
        if live.answered is not None:
            live.answered(now_s)

    def _refused(self, now_s: float, item: WorkItem, reason: str, answered: Callable[[float], None] | None) -> None:
        each = self.classes[item.traffic_class]
        each.refused[reason] = each.refused.get(reason, 0) + 1
        each.with_slo += has_slo(item)
        if answered is not None:
            answered(now_s)


def has_slo(item: WorkItem) -> bool:
    slo = item.slo
    return bool(slo.ttft_s or slo.tpot_s or slo.deadline_s)


def hash_of(text: str) -> int:
    """Hash a session's name to a number that is the same in every run; Python's own hash is not."""
    value = 1469598103934665603
    for byte in text.encode():
        value = (value ^ byte) * 1099511628211 & 0x3FFF_FFFF_FFFF_FFFF
    return value
