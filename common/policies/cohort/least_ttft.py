"""Where a request runs: the worker on which its first token is predicted to come soonest.

    every worker that can hold it (of many: a few) ─▶ one per device (the others of a device stand by)
           ─▶ predicted TTFT there + the price of the memory that everything there will still need
           ─▶ in time on no worker: what `admission_test` says of the soonest
           ─▶ whole on the best; or, where its decode row would close a worker to prompts, its prompt there and its
              decode row with those that have closed one already (P/D of this one request)

A `Placement` of the manager. Roles are preferences: every worker may prefill and decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf

from cohort.common.policies.baselines.batch_builder import RankKey
from cohort.common.policies.baselines.placements import fits, impossible
from cohort.common.policies.cohort.admission_check import AdmissionTest
from cohort.common.policies.cohort.arriving_prompts import ArrivingPrompts, slowdown
from cohort.common.policies.cohort.known_request import Known
from cohort.common.policies.cohort.mixing import HEADROOM
from cohort.common.policies.cohort.placed_work import PlacedWork
from cohort.common.policies.cohort.prefix_record import Cached, Chain, PrefixRecord
from cohort.common.policies.cohort.promise import targets
from cohort.common.policies.cohort.prompt_order import PromptOrder
from cohort.common.policies.cohort.shortlist import MOST, Shortlist
from cohort.common.policies.cohort.ttft_forecast import Pace, memory_price_s, mixes, transfer_fits
from cohort.common.policies.interface import (
    ClusterView,
    Impossible,
    InstanceView,
    Placed,
    Placement,
    Refuse,
    Wait,
    WaitingRequest,
)
from cohort.common.policies.link_price import transfer_seconds
from cohort.common.policies.prediction_error import PredictionError
from cohort.common.policies.settings import CohortSettings
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.types import InstanceId, KvGeometry, Request, RequestId, Segment

_USEFUL = 64
"""Prompt tokens: where fewer can be computed beside the decode rows in time, prompts get nowhere."""
_UNMEASURED_BYTES_PER_S = 2.0e10
"""Rate between two workers until a transfer was measured: one PCIe 4 link of 16 lanes."""
_ADAPTER_LOAD_S = 0.2
"""Time to load a LoRA adapter, until a worker has loaded one."""
_BY_LENGTH = ("most_in_time", "shortest")
"""Orders in which shorter prompts that come later go first."""
_ALL = 1 << 30
"""Length above that of any prompt."""
Stretch = tuple[float, float]
"""Seconds that one of waiting, and one of computing, become because shorter prompts keep coming."""
EvenLoad = tuple[float, float]
"""Decode rows, and the positions they attend to, on a device if all were spread evenly."""


@dataclass(slots=True)
class Candidate:
    """Worker, and what would become of the request there. `ttft_s`: predicted. Two prices are added when workers are
    compared: `delay_s`, of the prompts behind it that wait longer for it, and of the time that prompts lose while its
    decode row makes iterations shorter (so that strict TPOTs gather); and `price_s`, of memory. `full`: with one more
    decode row, these alone exceed the strictest TPOT. `closed`: no useful chunk of a prompt fits beside the decode rows
    in time. `closes`: nor would it with this request's row, all rows spread evenly over the devices."""

    view: InstanceView
    work: PlacedWork
    pace: Pace
    cached: int
    ttft_s: float
    delay_s: float
    price_s: float
    full: bool
    closed: bool
    closes: bool


@dataclass(slots=True)
class _PlacementRequest:
    """Request to be placed. `output`: tokens expected of it; `variance`: of that. `overtaking`: cache positions per
    second that later, shorter prompts need on every device."""

    request: Request
    known: Known
    output: float
    variance: float
    slowdown: Stretch
    overtaking: float
    chain: Chain
    cached: Cached
    even_share: EvenLoad
    ranks: dict[float, RankKey] = field(default_factory=dict)
    """Rank among a worker's prompts, by what a token takes there."""

    def growth(self, geometry: KvGeometry, cached: int) -> float:
        """Return the positions needed on a worker that has `cached` of them."""
        own = self.known.tokens - cached
        return geometry.growth(cached, own, ceil(self.output)) if geometry.frees_behind_window else own + self.output


class LeastTtft(Placement):
    wants_step_times = True

    def __init__(
        self, options: CohortSettings, test: AdmissionTest, *, default_output: float, own_order: bool, caching: bool
    ) -> None:
        """`default_output`: tokens expected of a request without a prediction. `own_order`: see `PlacedWork`."""
        self._options, self._test = options, test
        self._default_output, self._own_order = default_output, own_order
        self._work: dict[InstanceId, PlacedWork] = {}
        self._known: dict[RequestId, Known] = {}
        self._prefixes = PrefixRecord() if caching else None
        self._arriving = ArrivingPrompts() if own_order and PromptOrder.of(options).first in _BY_LENGTH else None
        self._rate = 0.0
        self._shortlist = Shortlist()
        self._whole = self._splits = self._full = 0
        self._cached_tokens = 0
        self._adapter_load_s = _ADAPTER_LOAD_S
        self._error = PredictionError()

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: InstanceId | None
    ) -> Placed | Wait | Impossible | Refuse:
        views = cluster.instances
        if not views:
            return Wait("no worker is registered")
        if self._shortlist.changed(views):
            self._retain(views)
        chain = Chain(waiting.request)
        cached = self._prefixes.cached(chain) if self._prefixes is not None else {}
        looked_at = self._shortlist.of(preferred, cached, waiting.request.adapter)
        able = [view for view in looked_at.values() if fits(view, waiting.request)]
        if not able and looked_at is not views:
            able = [view for view in views.values() if fits(view, waiting.request)][:MOST]
            looked_at = {view.instance: view for view in able}
        if not able:
            return impossible(views.values(), waiting.request)
        self._refresh(now_s, looked_at)
        devices = self._devices(able, looked_at.values())
        works = [self._work[name] for name in looked_at]
        rows, context = sum([work.rows for work in works]), sum([work.context for work in works])
        all_devices = len(devices) if looked_at is views else self._shortlist.devices
        wanted = self._placement_request(
            now_s, waiting, (rows / len(devices), context / len(devices)), all_devices, chain, cached
        )
        candidates = [self.forecast(now_s, view, others, wanted) for view, others in devices]
        best = next((c for c in candidates if c.view.instance == preferred), None)
        if best is not None:
            return self._record_placed(now_s, wanted, best, "as preferred")
        self._rate = sum([candidate.pace.rate for candidate in candidates]) * all_devices / len(devices)
        # A worker that has said nothing of its pace may be soon enough.
        soonest_s = min(candidate.ttft_s if _is_paced(candidate.view) else 0.0 for candidate in candidates)
        verdict = self._test.judge(now_s, waiting, soonest_s)
        if isinstance(verdict, Refuse):
            return verdict
        if verdict == "serve":
            return self._place(now_s, wanted, candidates, views)
        wanted.known.demote()
        placed = self._place(now_s, wanted, candidates, views)
        return replace(placed, best_effort=True, forecast_s=self._test.forecast_s(now_s, waiting, soonest_s))

    def _place(
        self,
        now_s: float,
        wanted: _PlacementRequest,
        candidates: list[Candidate],
        views: Mapping[InstanceId, InstanceView],
    ) -> Placed:
        ordered = sorted(candidates, key=_key)
        best = ordered[0]
        self._shortlist.remember(candidate.view.instance for candidate in ordered[1:])
        if not (best.closes or best.closed):
            return self._record_placed(now_s, wanted, best, "its first token comes soonest here")
        home = self._decode_only_worker(views, candidates, best, wanted)
        if home is None:
            return self._record_placed(now_s, wanted, best, "no worker for its decode alone")
        return self._share(now_s, wanted, best, home)

    def reported(self, now_s: float, view: InstanceView) -> None:
        """Read a report at once, so that a decision does not cost more with what workers have."""
        work = self._work.get(view.instance)
        if work is None:
            work = self._work[view.instance] = PlacedWork(self._options, own_order=self._own_order)
        if work.refresh(now_s, view, self._known):
            self._learn(work)
            self._adapter_load_s = view.stats.adapter_load_s or self._adapter_load_s

    def finished(self, now_s: float, request_id: RequestId) -> None:
        known = self._known.pop(request_id, None)
        for name in known.sent_to if known is not None else ():
            if name in self._work:
                self._work[name].forget(request_id)

    def metrics(self) -> dict[str, float]:
        """Return counters, and `ttft_error` = |predicted − real| / real and `ttft_bias` = predicted / real, moving
        averages over first tokens that reports show. `placed_full_total`: placed where decodes fill the bound."""
        return {
            "splits_total": float(self._splits),
            "whole_total": float(self._whole),
            "placed_full_total": float(self._full),
            "standby_workers": float(self._shortlist.standbys),
            "prefix_tokens_expected_total": float(self._cached_tokens),
            **self._error.metrics("ttft"),
        }

    def _retain(self, views: Mapping[InstanceId, InstanceView]) -> None:
        """Forget the work of workers that are not in `views`."""
        for name in [name for name in self._work if name not in views]:
            del self._work[name]
        if self._prefixes is not None:
            self._prefixes.only(views)

    def _refresh(self, now_s: float, views: Mapping[InstanceId, InstanceView]) -> None:
        """Read views that are newer than the work known of their workers. The manager has none: it calls `reported`."""
        for name, view in views.items():
            work = self._work.get(name)
            if work is None or work.stats is not view.stats:
                self.reported(now_s, view)

    def _learn(self, work: PlacedWork) -> None:
        """Compare first tokens with their forecasts. A report names the positions of every decode row: its first token
        came as many iterations ago as it has positions beyond its prompt, and half of the one in flight. Responses that
        ended before a report showed them, or whose prompt another worker computed, teach nothing."""
        step_s = work.stats.step_s
        for row, known in work.reported.take_begun():
            if known.predicted_s is None:
                continue
            first_s = work.reported_s - (row.context - known.tokens + 0.5) * step_s
            real_s = max(first_s - known.placed_s, step_s, 1e-3)
            predicted_s, known.predicted_s = known.predicted_s, None
            self._error.add(predicted_s, real_s)

    def _placement_request(
        self, now_s: float, waiting: WaitingRequest, even: EvenLoad, devices: int, chain: Chain, cached: Cached
    ) -> _PlacementRequest:
        request = waiting.request
        most = float(request.sampling.max_tokens - request.output_known)
        output = max(1.0, min(most, waiting.expected_output(self._default_output) - request.output_known))
        prediction = waiting.prediction
        spread = max(0.0, min(prediction.p90, most) - prediction.mean) if prediction else 0.0
        ttft_s, _ = targets(request.slo, output) if request.traffic_class == "rt" else (0.0, 0.0)
        known = Known(
            attempt=request.attempt,
            best_effort=request.traffic_class != "rt",
            priority=request.priority,
            arrived_s=now_s - request.waited_s,
            due_s=now_s + ttft_s if ttft_s else inf,
            tpot_s=request.slo.tpot_s if ttft_s else 0.0,  # a named one: what follows from a deadline is a guess
            tokens=len(request.tokens),
            cached=0,
            variance=spread * spread,
            placed_s=now_s,
        )
        stretched, overtaking = self._overtaken(now_s, known, output)
        return _PlacementRequest(
            request, known, output, spread * spread, stretched, overtaking / devices, chain, cached, even
        )

    def _overtaken(self, now_s: float, known: Known, output: float) -> tuple[Stretch, float]:
        """Return the stretch, and the positions per second that overtake. Half a prompt is left on average
        meanwhile."""
        if self._arriving is None:
            return (1.0, 1.0), 0.0
        if known.best_effort:
            every = self._arriving.shorter_per_s(_ALL)
            stretched = slowdown(every.tokens, self._rate)
            return (stretched, stretched), every.positions
        waiting, computing = (self._arriving.shorter_per_s(tokens) for tokens in (known.tokens, known.tokens // 2))
        self._arriving.arrived(now_s, known.tokens, known.tokens + output)
        return (slowdown(waiting.tokens, self._rate), slowdown(computing.tokens, self._rate)), waiting.positions

    def _devices(
        self, able: list[InstanceView], views: Iterable[InstanceView]
    ) -> list[tuple[InstanceView, list[PlacedWork]]]:
        """Return one worker per device, and the work of those that share it. Decode rows of a shared device gather on
        the worker whose role decodes, then on the one that has rows already; the others are warm standbys."""
        if not any(view.capacity.device for view in able):
            return [(view, []) for view in able]
        chosen: dict[str, InstanceView] = {}
        for view in able:
            device = view.capacity.device or view.instance
            other = chosen.get(device)
            if other is None or self._leads(view) < self._leads(other):
                chosen[device] = view
        sharing: dict[str, list[InstanceView]] = {}
        for view in views:
            if view.capacity.device:
                sharing.setdefault(view.capacity.device, []).append(view)
        return [
            (view, [self._work[v.instance] for v in sharing.get(view.capacity.device, ()) if v is not view])
            for view in chosen.values()
        ]

    def _leads(self, view: InstanceView) -> tuple[bool, int, InstanceId]:
        return (not view.role.decodes, -self._work[view.instance].rows, view.instance)

    def forecast(
        self, now_s: float, view: InstanceView, others: list[PlacedWork], wanted: _PlacementRequest
    ) -> Candidate:
        """Return what would become of this request on a worker. `others`: work of those that share its device."""
        options, known, work = self._options, wanted.known, self._work[view.instance]
        cached = wanted.cached.get(view.instance, 0)
        own, headroom = known.tokens - cached, 1.0 - HEADROOM
        pace = work.pace(others)
        rank = wanted.ranks.get(work.token_s)
        if rank is None:
            rank = wanted.ranks[work.token_s] = work.rank(now_s, known)
        done = work.done(now_s, pace)
        tokens, pairs = work.before(rank, done)
        behind = work.prompt_tokens
        busy, strictest_s = work.busy, work.strictest_s
        for other in others:
            more, more_pairs = other.before(other.rank(now_s, known), 0.0)
            tokens, pairs, behind = tokens + more, pairs + more_pairs, behind + other.prompt_tokens
            busy, strictest_s = busy or other.busy, min(strictest_s, other.strictest_s)
        behind = max(0, behind - int(done) - tokens)
        ttft_s = pace.seconds(tokens + own, pairs + own * (cached + 0.5 * own), behind)
        if ttft_s > pace.aim_s:  # what comes while it waits, and while it is computed
            waiting, own_part = wanted.slowdown
            share = own / (tokens + own)
            ttft_s = pace.aim_s + (ttft_s - pace.aim_s) * (waiting * (1.0 - share) + own_part * share)
        load_s, again_s = self._loading(view, wanted.request.adapter)
        if load_s:  # beside whatever computes there
            ttft_s = max(ttft_s, load_s + pace.seconds(own, own * (cached + 0.5 * own)))
        if busy:  # the iteration in flight
            ttft_s += 0.5 * min(pace.aim_s, view.stats.step_s or pace.aim_s)
        needed, variance, free = work.memory
        growth = wanted.growth(view.capacity.geometry, cached)
        total = float(view.capacity.positions)
        price_s = memory_price_s(needed + growth, variance + wanted.variance, free, total)
        if needed + growth > free:
            alike = known.best_effort or not options.yielding
            blocked_s = work.blocked_s(rank, growth, wanted.overtaking, best_effort=alike)
            ttft_s = max(ttft_s, blocked_s + pace.seconds(own, own * (cached + 0.5 * own)))
        delay_s = behind / pace.rate + again_s
        if known.tpot_s:
            delay_s += work.slowed(known.tpot_s * headroom, pace) * known.tpot_s * wanted.output
        full = closed = closes = False
        bound_s = min(strictest_s, known.tpot_s or inf) * headroom
        even, even_context = wanted.even_share
        if others or work.crowded_s(_USEFUL, int(even) + 1) > bound_s:
            rows, context = work.rows, work.context
            for other in others:
                rows, context = rows + other.rows, context + other.context
            with_it = BatchShape(0, 0, 0, rows + 1, context + known.tokens)
            full = known.tpot_s > 0 and step_seconds(work.times, with_it) > bound_s
            if rows < even:
                with_it = BatchShape(0, 0, 0, int(even) + 1, int(even_context) + known.tokens)
            closes = known.tpot_s > 0 and not mixes(work.times, with_it, _USEFUL, bound_s)
            if strictest_s < inf:
                without_it = BatchShape(0, 0, 0, max(rows, 1), context)
                closed = not mixes(work.times, without_it, _USEFUL, strictest_s * headroom)
        return Candidate(view, work, pace, cached, ttft_s, delay_s, price_s, full, closed, closes)

    def _loading(self, view: InstanceView, adapter: str) -> tuple[float, float]:
        """Return how long the request waits for its LoRA adapter, and the next one of an adapter that goes for it."""
        if view.holds(adapter):
            return 0.0, 0.0
        load_s = view.stats.adapter_load_s or self._adapter_load_s
        return load_s, 0.0 if view.has_adapter_slot else load_s

    def _decode_only_worker(
        self,
        views: Mapping[InstanceId, InstanceView],
        candidates: list[Candidate],
        best: Candidate,
        wanted: _PlacementRequest,
    ) -> Candidate | None:
        """Return a worker for the decode alone: of those closed to prompts already, with time and memory for it, the
        one with most rows, so that the others open again; None if moving the KV over the measured link breaks the
        request's own TPOT."""
        request, tokens = wanted.request, wanted.known.tokens
        if best.closed or tokens - request.prompt_tokens + 1 >= request.sampling.max_tokens:
            return None
        # Without the one that is kept for prompts: do the others' decode rows leave the bound?
        others = len(candidates) - 1
        each = len(candidates) / max(1, others)
        rows = BatchShape(0, 0, 0, int(wanted.even_share[0] * each) + 1, int(wanted.even_share[1] * each) + tokens)
        homes: list[tuple[Candidate, float]] = []
        for candidate in candidates:
            if step_seconds(candidate.work.times, rows) > wanted.known.tpot_s:
                continue
            if candidate.closed and candidate is not best:
                work = candidate.work
                with_it = BatchShape(0, 0, 0, work.rows + 1, work.context + tokens)
                late_s = step_seconds(work.times, with_it) - min(work.strictest_s, wanted.known.tpot_s)
                homes.append((candidate, late_s))
        sender, nbytes = best.view.instance, tokens * best.view.capacity.geometry.token_bytes
        unmeasured_s = nbytes / _UNMEASURED_BYTES_PER_S

        def transfer_s(candidate: Candidate) -> float:
            receiver = candidate.view.instance
            return transfer_seconds(views, sender, receiver, tokens, unmeasured_s=unmeasured_s)

        free = [
            candidate
            for candidate, late_s in homes
            if candidate.price_s <= 1.0 and transfer_fits(transfer_s(candidate), wanted.output, -late_s)
        ]
        if free:
            return max(free, key=lambda c: (c.work.rows, c.view.instance))
        if homes and sum(not candidate.closed for candidate in candidates) == 1:
            # The last worker that computes prompts in time stays one.
            costs = [late_s + transfer_s(home) / wanted.output for home, late_s in homes]
            return min(zip(costs, homes, strict=True), key=lambda each: (each[0], each[1][0].view.instance))[1][0]
        return None

    def _record_placed(self, now_s: float, wanted: _PlacementRequest, best: Candidate, why: str) -> Placed:
        self._whole += 1
        self._note(now_s, wanted, best, prompt=True, decode=True)
        wanted.known.predicted_s = best.ttft_s
        return Placed((Segment(0, None, best.view.instance),), f"whole: {why}", best.ttft_s)

    def _share(self, now_s: float, wanted: _PlacementRequest, first: Candidate, second: Candidate) -> Placed:
        self._splits += 1
        self._note(now_s, wanted, first, prompt=True, decode=False)
        self._note(now_s, wanted, second, prompt=False, decode=True)
        end = wanted.known.tokens
        segments = (Segment(0, end, first.view.instance), Segment(end, None, second.view.instance))
        return Placed(segments, "split: its decode would close a worker to prompts", first.ttft_s)

    def _note(self, now_s: float, wanted: _PlacementRequest, where: Candidate, *, prompt: bool, decode: bool) -> None:
        known = wanted.known
        known.sent_to += (where.view.instance,)
        if wanted.request.adapter:
            self._shortlist.placed(wanted.request.adapter, where.view.instance)
        if prompt:
            known.cached = where.cached
            self._cached_tokens += where.cached
            self._full += where.full
            self._known[known.attempt.request_id] = known
            if known.attempt.number:  # another worker may still list an attempt before this one
                for work in self._work.values():
                    work.invalidate(known.attempt.request_id)
        where.work.place(now_s, known, prompt=prompt, decode=decode, output=wanted.output)
        if self._prefixes is not None:
            positions = known.tokens - where.cached + (wanted.output if decode else 0.0)
            self._prefixes.placed(wanted.chain, where.view, positions)


def _is_paced(view: InstanceView) -> bool:
    return view.stats.step_times is not None or view.stats.prefill_tokens_per_s > 0


def _key(candidate: Candidate) -> tuple[bool, float, InstanceId]:
    return (
        candidate.full or candidate.closed,
        candidate.ttft_s + candidate.delay_s + candidate.price_s,
        candidate.view.instance,
    )
