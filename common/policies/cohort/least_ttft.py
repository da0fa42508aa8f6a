"""Where a request runs: the worker on which its first token is predicted to come soonest.

Closed: a worker whose decode rows (decoding sequences' tokens in a step) leave prompts no time within the rows' TPOTs.

    workers that can hold it (in a large cluster: a shortlist) ─▶ one per device (the others on it are warm standbys)
           ─▶ predicted TTFT there + delay of other requests + penalty for the cache filling up, all in seconds
           ─▶ TTFT SLO missed on every worker: the admission test decides (serve, best effort, refuse)
           ─▶ the whole request on the best worker; only its prompt, if its decode row would close that one and fits
              on a worker that is closed already: this gets the decode row (P/D of this one request)

Implements the manager's `Placement`. Roles are preferences: every worker may prefill and decode. Positions: KV slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf

from cohort.common.policies.baselines.batch_builder import RankKey
from cohort.common.policies.baselines.placements import fits, impossible
from cohort.common.policies.cohort.admission_check import AdmissionTest
from cohort.common.policies.cohort.arriving_prompts import ArrivingPrompts, slowdown
from cohort.common.policies.cohort.mixing import HEADROOM
from cohort.common.policies.cohort.placed_work import PlacedWork
from cohort.common.policies.cohort.prefix_record import Cached, Chain, PrefixRecord
from cohort.common.policies.cohort.promise import targets
from cohort.common.policies.cohort.prompt_order import PromptOrder
from cohort.common.policies.cohort.request_record import RequestRecord
from cohort.common.policies.cohort.shortlist import MAX_DEVICES, Shortlist
from cohort.common.policies.cohort.ttft_forecast import Pace, fits_chunk, memory_price_s, transfer_fits
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

_MIN_USEFUL_CHUNK = 64
"""Prompt tokens for which an open worker's steps have time beside its decode rows; with time for fewer it is closed."""
_MAX_DECODE_PENALTY_S = 1.0
"""Maximum `Candidate.memory_penalty_s` of a split request's decode worker: 1.75 (0.75 + 1.0) caches of expected KV."""
_UNMEASURED_BYTES_PER_S = 2.0e10
"""Rate between two workers until a transfer was measured: one PCIe 4 link of 16 lanes."""
_ADAPTER_LOAD_S = 0.2
"""Time to load a LoRA adapter, until a worker has loaded one."""
_OVERTAKING = ("most_in_time", "shortest")
"""Prompt orders in which shorter prompts overtake longer ones that came earlier."""
_ANY_LENGTH = 1 << 30  # tokens, more than any prompt has
Views = Mapping[InstanceId, InstanceView]
Slowdowns = tuple[float, float]
"""Factors by which waiting, and computing, take longer because shorter prompts arrive later and overtake."""
MeanLoad = tuple[float, float]
"""Decode rows of an average device, and the tokens of context that they attend to."""


@dataclass(slots=True)
class Candidate:
    """Worker, and what is predicted of the request there. Of those neither full nor closed, the best has the least
    sum of `ttft_s`, `delay_s` and `memory_penalty_s`. `delay_s` lets strict TPOTs gather on few workers."""

    view: InstanceView
    work: PlacedWork  # reported from there, and placed since
    pace: Pace  # speed at which prompts are computed there
    cached: int  # tokens of the prompt in the worker's prefix cache
    ttft_s: float
    delay_s: float  # of other prompts: of those behind this one and, by its TPOT's shorter steps, of all in its decode
    memory_penalty_s: float  # for KV expected beyond three quarters of the cache: a second per whole cache
    full: bool  # with this request's row the decode rows alone would exceed the strictest TPOT
    closed: bool  # no useful chunk of a prompt fits beside the decode rows within the strictest TPOT
    closes: bool  # with its row none would fit, counting at least as many rows as an average device has


@dataclass(slots=True)
class _Placing:
    """Request to be placed. `output`: predicted tokens; `variance`: (p90 − mean)² of them. `overtaking`: positions per
    second and device that later, shorter prompts take."""

    request: Request
    record: RequestRecord
    output: float
    variance: float
    slowdowns: Slowdowns
    overtaking: float
    chain: Chain
    cached: Cached
    mean_load: MeanLoad
    ranks: dict[tuple[float, int], RankKey] = field(default_factory=dict)  # by token_s, cached

    def growth(self, geometry: KvGeometry, cached: int) -> float:
        """Return the positions needed on a worker that has `cached` of them."""
        left = self.record.tokens - cached
        return geometry.growth(cached, left, ceil(self.output)) if geometry.frees_behind_window else left + self.output


class LeastTtft(Placement):
    wants_step_times = True

    def __init__(
        self, options: CohortSettings, test: AdmissionTest, *, default_output: float, own_order: bool, caching: bool
    ) -> None:
        """`default_output`: tokens expected of a request without a prediction. `own_order`: whether workers order their
        prompts by rank, not by arrival."""
        self._options, self._test = options, test
        self._default_output, self._own_order = default_output, own_order
        self._work: dict[InstanceId, PlacedWork] = {}
        self._records: dict[RequestId, RequestRecord] = {}
        self._prefixes = PrefixRecord() if caching else None
        self._arriving = ArrivingPrompts() if own_order and PromptOrder.of(options).first in _OVERTAKING else None
        self._prompt_rate = 0.0  # prompt tokens per second of the cluster, as of the last placement
        self._shortlist = Shortlist()
        self._whole_count = self._split_count = self._full_count = 0
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
        shortlist = self._shortlist.of(preferred, cached, waiting.request.adapter)
        able = [view for view in shortlist.values() if fits(view, waiting.request)]
        if not able and shortlist is not views:  # of the shortlist none can hold it: look at those that can
            able = [view for view in views.values() if fits(view, waiting.request)][:MAX_DEVICES]
            shortlist = {view.instance: view for view in able}
        if not able:
            return impossible(views.values(), waiting.request)
        self._refresh(now_s, shortlist)
        by_device = self._by_device(able, shortlist.values())
        works = [self._work[name] for name in shortlist]
        rows, context = sum([work.rows for work in works]), sum([work.context for work in works])
        mean_load = rows / len(by_device), context / len(by_device)
        device_count = len(by_device) if shortlist is views else self._shortlist.devices
        placing = self._placing(now_s, waiting, mean_load, device_count, chain, cached)
        candidates = [self.forecast(now_s, view, sharing, placing) for view, sharing in by_device]
        best = next((c for c in candidates if c.view.instance == preferred), None)
        if best is not None:
            return self._place_whole(now_s, placing, best, "as preferred")
        self._prompt_rate = sum([candidate.pace.rate for candidate in candidates]) * device_count / len(by_device)
        # A worker without measured step times counts as in time.
        soonest_s = min(candidate.ttft_s if _is_measured(candidate.view) else 0.0 for candidate in candidates)
        verdict = self._test.judge(now_s, waiting, soonest_s)
        if isinstance(verdict, Refuse):
            return verdict
        if verdict == "serve":
            return self._place(now_s, placing, candidates, views)
        placing.record.demote()
        placed = self._place(now_s, placing, candidates, views)
        # The TTFT for which it was demoted, counted from its arrival (`ttft_s` counts from now).
        return replace(placed, best_effort=True, forecast_s=self._test.forecast_s(now_s, waiting, soonest_s))

    def _place(self, now_s: float, placing: _Placing, candidates: list[Candidate], views: Views) -> Placed:
        ordered = sorted(candidates, key=_sort_key)
        best = ordered[0]
        self._shortlist.remember(each.view.instance for each in ordered[1:])  # likely the best next time
        if not (best.closes or best.closed):
            return self._place_whole(now_s, placing, best, "its first token comes soonest here")
        decode_worker = self._decode_worker(views, candidates, best, placing)
        if decode_worker is None:  # or no use in a split: `best` is closed itself, or there is one token only
            return self._place_whole(now_s, placing, best, "no worker for its decode alone")
        return self._place_split(now_s, placing, best, decode_worker)

    def reported(self, now_s: float, view: InstanceView) -> None:
        """Read a report when it comes, so that a placement does not cost more the more work workers have."""
        work = self._work.get(view.instance)
        if work is None:
            work = self._work[view.instance] = PlacedWork(self._options, own_order=self._own_order)
        if work.refresh(now_s, view, self._records):
            self._score_forecasts(work)
            self._adapter_load_s = view.stats.adapter_load_s or self._adapter_load_s

    def finished(self, now_s: float, request_id: RequestId) -> None:
        record = self._records.pop(request_id, None)
        for name in record.sent_to if record is not None else ():
            if name in self._work:
                self._work[name].forget(request_id)

    def metrics(self) -> dict[str, float]:
        """Return counters, and `ttft_error` = |predicted − real| / real and `ttft_bias` = predicted / real, moving
        averages over first tokens that reports show. `placed_full_total`: of requests on `full` workers."""
        return {
            "splits_total": float(self._split_count),
            "whole_total": float(self._whole_count),
            "placed_full_total": float(self._full_count),
            "standby_workers": float(self._shortlist.standbys),
            "prefix_tokens_expected_total": float(self._cached_tokens),
            **self._error.metrics("ttft"),
        }

    def _retain(self, views: Views) -> None:
        """Forget the work of workers that are not in `views`."""
        for name in [name for name in self._work if name not in views]:
            del self._work[name]
        if self._prefixes is not None:
            self._prefixes.only(views)

    def _refresh(self, now_s: float, views: Views) -> None:
        """Read views that were not passed to `reported`: of workers that registered and have sent no report since."""
        for name, view in views.items():
            work = self._work.get(name)
            if work is None or work.stats is not view.stats:
                self.reported(now_s, view)

    def _score_forecasts(self, work: PlacedWork) -> None:
        """Compare first tokens with forecasts. The first token of a decode row with n positions beyond its prompt came
        about n + 0.5 steps before the report. Left out: responses that no report showed, and split requests' ones."""
        step_s = work.stats.step_s
        for row, record in work.reported.take_new_decodes():
            if record.predicted_s is None:
                continue
            first_at_s = work.reported_s - (row.context - record.tokens + 0.5) * step_s
            real_s = max(first_at_s - record.placed_at_s, step_s, 1e-3)
            predicted_s, record.predicted_s = record.predicted_s, None
            self._error.add(predicted_s, real_s)

    def _placing(
        self, now_s: float, waiting: WaitingRequest, mean_load: MeanLoad, devices: int, chain: Chain, cached: Cached
    ) -> _Placing:
        request, known_output_tokens = waiting.request, waiting.request.output_known
        max_output = float(request.sampling.max_tokens - known_output_tokens)
        output = max(1.0, min(max_output, waiting.expected_output(self._default_output) - known_output_tokens))
        prediction = waiting.prediction
        spread = max(0.0, min(prediction.p90, max_output) - prediction.mean) if prediction else 0.0
        real_time = request.traffic_class == "rt"
        ttft_s = targets(request.slo, output)[0] if real_time else 0.0
        promised = ttft_s > 0.0  # it has a TTFT SLO or a deadline
        record = RequestRecord(
            attempt=request.attempt,
            best_effort=not real_time,
            priority=request.priority,
            arrived_s=now_s - request.waited_s,
            due_s=now_s + ttft_s if promised else inf,
            tpot_s=request.slo.tpot_s if promised else 0.0,  # only a named TPOT: one derived from a deadline is a guess
            tokens=len(request.tokens),
            cached=0,  # set by `_record`
            variance=spread * spread,
            placed_at_s=now_s,
        )
        left = record.tokens - max(cached.values(), default=0)
        slowdowns, overtaking = self._note_arrival(now_s, record, left, output)
        return _Placing(
            request, record, output, spread * spread, slowdowns, overtaking / devices, chain, cached, mean_load
        )

    def _note_arrival(self, now_s: float, record: RequestRecord, left: int, output: float) -> tuple[Slowdowns, float]:
        """Return the slowdowns by later prompts that overtake, and the positions per second that they take. `left`: its
        tokens that no cache has; while it is computed, half of them on average. Record its arrival, unless it is best
        effort."""
        if self._arriving is None:
            return (1.0, 1.0), 0.0
        if record.best_effort:
            every = self._arriving.shorter_per_s(_ANY_LENGTH)
            factor = slowdown(every.tokens, self._prompt_rate)
            return (factor, factor), every.positions
        shorter, half = (self._arriving.shorter_per_s(tokens) for tokens in (left, left // 2))
        self._arriving.arrived(now_s, left, record.tokens + output)
        waiting, computing = (slowdown(work.tokens, self._prompt_rate) for work in (shorter, half))
        return (waiting, computing), shorter.positions

    def _by_device(
        self, able: list[InstanceView], views: Iterable[InstanceView]
    ) -> list[tuple[InstanceView, list[PlacedWork]]]:
        """Return one worker per device, and the work of the others on it, which are warm standbys. Chosen is one whose
        role decodes; of several, the one with most decode rows."""
        if not any(view.capacity.device for view in able):
            return [(view, []) for view in able]
        chosen: dict[str, InstanceView] = {}
        for view in able:
            device = view.capacity.device or view.instance
            other = chosen.get(device)
            if other is None or self._device_order(view) < self._device_order(other):
                chosen[device] = view
        sharing: dict[str, list[InstanceView]] = {}
        for view in views:
            if view.capacity.device:
                sharing.setdefault(view.capacity.device, []).append(view)
        return [
            (view, [self._work[v.instance] for v in sharing.get(view.capacity.device, ()) if v is not view])
            for view in chosen.values()
        ]

    def _device_order(self, view: InstanceView) -> tuple[bool, int, InstanceId]:
        return (not view.role.decodes, -self._work[view.instance].rows, view.instance)

    def forecast(self, now_s: float, view: InstanceView, sharing: list[PlacedWork], placing: _Placing) -> Candidate:
        """Return what would become of this request on a worker. `sharing`: work of the others on its device."""
        options, record, work = self._options, placing.record, self._work[view.instance]
        cached = placing.cached.get(view.instance, 0)
        own_tokens, usable_share = record.tokens - cached, 1.0 - HEADROOM
        own_pairs = own_tokens * (cached + 0.5 * own_tokens)  # query-key pairs of attention
        pace = work.pace(sharing)
        rank = placing.ranks.get((work.token_s, cached))
        if rank is None:
            rank = placing.ranks[work.token_s, cached] = work.rank(now_s, record, cached)
        computed = work.done(now_s, pace)  # since the report
        tokens_before, pairs_before = work.before(rank, computed)
        all_tokens, busy, strictest_s = work.prompt_tokens, work.busy, work.strictest_s
        for other in sharing:
            tokens, pairs = other.before(other.rank(now_s, record, cached), 0.0)  # 0.0: theirs count as last reported
            tokens_before, pairs_before = tokens_before + tokens, pairs_before + pairs
            all_tokens += other.prompt_tokens
            busy, strictest_s = busy or other.busy, min(strictest_s, other.strictest_s)
        tokens_behind = max(0, all_tokens - int(computed) - tokens_before)
        ttft_s = pace.seconds(tokens_before + own_tokens, pairs_before + own_pairs, tokens_behind)  # fill its last step
        if ttft_s > pace.target_step_s:  # after the current step other prompts may overtake
            waiting, computing = placing.slowdowns
            own_share = own_tokens / (tokens_before + own_tokens)
            factor = waiting * (1.0 - own_share) + computing * own_share
            ttft_s = pace.target_step_s + (ttft_s - pace.target_step_s) * factor
        load_s, reload_s = self._adapter_seconds(view, placing.request.adapter)
        if load_s:  # other requests are computed meanwhile
            ttft_s = max(ttft_s, load_s + pace.seconds(own_tokens, own_pairs))
        if busy:  # half of the step in flight
            ttft_s += 0.5 * min(pace.target_step_s, view.stats.step_s or pace.target_step_s)
        needed, variance, free = work.memory
        growth = placing.growth(view.capacity.geometry, cached)
        penalty_s = memory_price_s(needed + growth, variance + placing.variance, free, float(view.capacity.positions))
        if needed + growth > free:
            as_best_effort = record.best_effort or not options.yielding  # else best-effort work yields its blocks
            blocked_s = work.blocked_s(rank, growth, placing.overtaking, best_effort=as_best_effort)
            ttft_s = max(ttft_s, blocked_s + pace.seconds(own_tokens, own_pairs))
        delay_s = tokens_behind / pace.rate + reload_s
        if record.tpot_s:  # while it decodes, prompts are computed more slowly
            delay_s += work.lost_pace_share(record.tpot_s * usable_share, pace) * record.tpot_s * placing.output
        full = closed = closes = False
        bound_s = min(strictest_s, record.tpot_s or inf) * usable_share
        mean_rows, mean_context = placing.mean_load
        # If even an upper bound of a step is within the TPOTs, all three flags stay false.
        if sharing or work.max_step_s(_MIN_USEFUL_CHUNK, int(mean_rows) + 1) > bound_s:
            rows = work.rows + sum([other.rows for other in sharing])
            context = work.context + sum([other.context for other in sharing])
            with_it = BatchShape.of_decodes(rows + 1, context + record.tokens)
            full = record.tpot_s > 0 and step_seconds(work.times, with_it) > bound_s
            evened_out = with_it
            if rows < mean_rows:  # as soon as the load is spread evenly, it has that many
                evened_out = BatchShape.of_decodes(int(mean_rows) + 1, int(mean_context) + record.tokens)
            closes = record.tpot_s > 0 and not fits_chunk(work.times, evened_out, _MIN_USEFUL_CHUNK, bound_s)
            if strictest_s < inf:
                present = BatchShape.of_decodes(max(rows, 1), context)
                closed = not fits_chunk(work.times, present, _MIN_USEFUL_CHUNK, strictest_s * usable_share)
        return Candidate(view, work, pace, cached, ttft_s, delay_s, penalty_s, full, closed, closes)

    def _adapter_seconds(self, view: InstanceView, adapter: str) -> tuple[float, float]:
        """Return the time to load the request's LoRA adapter, and the time to load the one evicted for it again."""
        if view.holds(adapter):
            return 0.0, 0.0
        load_s = view.stats.adapter_load_s or self._adapter_load_s
        return load_s, 0.0 if view.has_adapter_slot else load_s

    def _decode_worker(
        self, views: Views, candidates: list[Candidate], best: Candidate, placing: _Placing
    ) -> Candidate | None:
        """Return the worker for the decode row of a split placement: of the closed ones with time and memory for it the
        one with most rows, so that the others open again. None: it should not be split, or the transfer over the
        measured link breaks its TPOT. TPOTs are compared without `HEADROOM`."""
        request, record = placing.request, placing.record
        # The prompt's worker samples the first token. If it is the last one, too, no decode is left.
        if best.closed or record.tokens - request.prompt_tokens + 1 >= request.sampling.max_tokens:
            return None
        # If prompts had one device alone, the others would share all decode rows: would their steps exceed the TPOT?
        share_factor = len(candidates) / max(1, len(candidates) - 1)
        rows, context = (int(each * share_factor) for each in placing.mean_load)
        decodes = BatchShape.of_decodes(rows + 1, context + record.tokens)
        closed: list[tuple[Candidate, float]] = []
        for candidate in candidates:
            if step_seconds(candidate.work.times, decodes) > record.tpot_s:  # they would: it is no choice
                continue
            if candidate.closed and candidate is not best:
                work = candidate.work
                with_it = BatchShape.of_decodes(work.rows + 1, work.context + record.tokens)
                slack_s = min(work.strictest_s, record.tpot_s) - step_seconds(work.times, with_it)
                closed.append((candidate, slack_s))
        sender, nbytes = best.view.instance, record.tokens * best.view.capacity.geometry.token_bytes
        unmeasured_s = nbytes / _UNMEASURED_BYTES_PER_S

        def transfer_s(candidate: Candidate) -> float:
            return transfer_seconds(views, sender, candidate.view.instance, record.tokens, unmeasured_s=unmeasured_s)

        fitting = [
            c
            for c, slack_s in closed
            if c.memory_penalty_s <= _MAX_DECODE_PENALTY_S and transfer_fits(transfer_s(c), placing.output, slack_s)
        ]
        if fitting:
            return max(fitting, key=lambda c: (c.work.rows, c.view.instance))
        if closed and sum(not candidate.closed for candidate in candidates) == 1:
            # Keep the last worker that is open to prompts open, even if this request's TPOT is missed.
            costs = [(transfer_s(c) / placing.output - slack_s, c.view.instance, c) for c, slack_s in closed]
            return min(costs, key=lambda cost: cost[:2])[2]
        return None

    def _place_whole(self, now_s: float, placing: _Placing, best: Candidate, why: str) -> Placed:
        self._whole_count += 1
        self._record(now_s, placing, best, prompt=True, decode=True)
        placing.record.predicted_s = best.ttft_s
        return Placed((Segment(0, None, best.view.instance),), f"whole: {why}", best.ttft_s)

    def _place_split(self, now_s: float, placing: _Placing, first: Candidate, second: Candidate) -> Placed:
        self._split_count += 1
        self._record(now_s, placing, first, prompt=True, decode=False)
        self._record(now_s, placing, second, prompt=False, decode=True)
        end = placing.record.tokens
        segments = (Segment(0, end, first.view.instance), Segment(end, None, second.view.instance))
        return Placed(segments, "split: its decode would close a worker to prompts", first.ttft_s)

    def _record(self, now_s: float, placing: _Placing, where: Candidate, *, prompt: bool, decode: bool) -> None:
        record = placing.record
        record.sent_to += (where.view.instance,)
        if placing.request.adapter:
            self._shortlist.placed(placing.request.adapter, where.view.instance)
        if prompt:
            record.cached = where.cached
            self._cached_tokens += where.cached
            self._full_count += where.full
            self._records[record.attempt.request_id] = record
            if record.attempt.number:  # a worker may still report an earlier attempt (try) of this request
                for work in self._work.values():
                    work.invalidate(record.attempt.request_id)
        where.work.place(now_s, record, prompt=prompt, decode=decode, output=placing.output)
        if self._prefixes is not None:
            positions = record.tokens - where.cached + (placing.output if decode else 0.0)
            self._prefixes.placed(placing.chain, where.view, positions)


def _is_measured(view: InstanceView) -> bool:
    return view.stats.step_times is not None or view.stats.prefill_tokens_per_s > 0


def _sort_key(candidate: Candidate) -> tuple[bool, float, InstanceId]:
    return (
        candidate.full or candidate.closed,  # last: TPOTs or prompts suffer there, however soon its first token comes
        candidate.ttft_s + candidate.delay_s + candidate.memory_penalty_s,
        candidate.view.instance,
    )
