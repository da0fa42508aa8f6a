"""The global scheduler: which two instances serve a request, and at which token it changes hands.

A `Placement` of the manager. Per request: the two instances that would be done with its prompt first, the split that
lets both end together (`split_search` over `timeline`s), and whether that is worth a KV transfer at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cohort.common.policies.baselines.placements import Colocated, fits
from cohort.common.policies.dynaserve.instance_work import InstanceWork, work_seconds
from cohort.common.policies.dynaserve.split_gain import PlacementRate, saved_by_moving_s, split_gain_s, unmixed_s
from cohort.common.policies.dynaserve.split_search import Split, search_split
from cohort.common.policies.dynaserve.timeline import SegmentWork
from cohort.common.policies.interface import (
    ClusterView,
    Impossible,
    InstanceView,
    Placed,
    Placement,
    Wait,
    WaitingRequest,
)
from cohort.common.policies.link_price import transfer_seconds
from cohort.common.policies.prediction_error import PredictionError
from cohort.common.policies.settings import DynaServeSettings
from cohort.common.policies.step_times.reported_times import COLD
from cohort.common.types import InstanceId, RequestId, Segment

_PROBES = 6
"""K of Alg. 1: split points tried for a request. Six halvings leave a sixty-fourth of it."""

_DECODES_SHARE = 0.75
"""Share of the bound that decodes alone may take on an instance that relieves another: the rest is for prompts."""


@dataclass(frozen=True, slots=True)
class _Choice:
    first: InstanceWork
    second: InstanceWork
    split: Split


class SplitPlacement(Placement):
    """D1–D3, D7, D8 · DynaServe §3.1, §4.1.

    A request of P + O^ tokens becomes [0, s) and [s, …) on two instances, s anywhere, or one segment.

    Differs from the paper in what is balanced, in the choice of the pair (round-robin there), in requests that stay
    whole, and in a split tried first for the work that it saves: docs/papers/dynaserve.md (D3).
    """

    wants_step_times = True

    def __init__(self, options: DynaServeSettings, *, default_output: float) -> None:
        """`default_output`: tokens expected of a request without a prediction."""
        self._options, self._default_output = options, default_output
        self._work: dict[InstanceId, InstanceWork] = {}
        self._expected: dict[RequestId, tuple[float, float]] = {}
        """Time of each request's placement and its predicted duration."""
        self._rate = PlacementRate()
        self._colocated = Colocated()
        self._views: Mapping[InstanceId, InstanceView] = {}
        self._splits = self._whole = self._probes = 0
        self._error = PredictionError()

    # -- the policy interface --------------------------------------------------------------------------------------

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: InstanceId | None
    ) -> Placed | Wait | Impossible:
        request = waiting.request
        views = cluster.instances
        able = [view for view in views.values() if fits(view, request)]
        for name in [name for name in self._work if name not in views]:
            del self._work[name]
        unified = [view for view in able if view.role.prefills and view.role.decodes]
        firsts = unified or [view for view in able if view.role.prefills]
        seconds = unified or [view for view in able if view.role.decodes]
        if not firsts or not seconds or preferred in views:
            return self._colocated.place(now_s, waiting, cluster, preferred)
        options, self._views = self._options, views
        prompt = len(request.tokens)
        most = request.sampling.max_tokens - request.output_known
        expected = waiting.expected_output(self._default_output) - request.output_known
        output = max(1, min(most, round(expected) + options.margin_tokens))
        slo_s = request.slo.tpot_s or options.tbt_slo_s
        whole = SegmentWork(prompt, 0, output)

        first, *others = self._in_order(now_s, firsts, slo_s, prompt, prefills=True)
        if not unified:
            others = self._in_order(now_s, seconds, slo_s, prompt, prefills=False)
        if not others or others[0] is first:
            return self._record_placed(now_s, request.request_id, first, whole, "only one instance")
        if any(view.stats.link_rates for view in views.values()):  # a slow link counts as work
            loads_s = {other.instance: other.load_s + self._transfer_s(first, other, prompt) for other in others}
            others.sort(key=lambda other: (self._full(other, slo_s, prompt), loads_s[other.instance]))
        second = others[0]
        if not unified:
            return self._share(now_s, request.request_id, self._search([(first, second)], prompt, output), whole)
        relief = self._relieving_split(first, others, slo_s, whole)
        if relief is not None:
            return self._share(now_s, request.request_id, _Choice(first, relief, Split(prompt, 0.0, 0.0, 0)), whole)
        if options.whole_where_idle and self._idle(first, slo_s, prompt):
            return self._record_placed(now_s, request.request_id, first, whole, "an instance is idle")
        if self._full(second, slo_s, prompt) and not self._full(first, slo_s, prompt):
            return self._record_placed(
                now_s, request.request_id, first, whole, "decodes fill the bound everywhere else"
            )
        choice = self._search([(first, second), (second, first)], prompt, output)
        whole_s = max(first.until_done(whole), second.until_done())
        if self._gain_s(now_s, choice, first, whole_s) <= self._handed_s(choice) + options.search_tolerance * whole_s:
            return self._record_placed(now_s, request.request_id, first, whole, "no gain from a split")
        return self._share(now_s, request.request_id, choice, whole)

    def finished(self, now_s: float, request_id: RequestId) -> None:
        self._expected.pop(request_id, None)
        for work in self._work.values():
            work.forget(request_id)

    def completed(self, now_s: float, request_id: RequestId) -> None:
        """D4 · Record how well the end was predicted."""
        placed = self._expected.pop(request_id, None)
        if placed is not None:
            since_s, predicted_s = placed
            self._error.add(predicted_s, max(now_s - since_s, 1e-6))

    def metrics(self) -> dict[str, float]:
        return {
            "splits_total": float(self._splits),
            "whole_total": float(self._whole),
            "split_probes_total": float(self._probes),
            **self._error.metrics("finish"),
        }

    # -- instances ---------------------------------------------------------------------------------------------

    def _in_order(
        self, now_s: float, views: list[InstanceView], slo_s: float, prompt: int, *, prefills: bool
    ) -> list[InstanceWork]:
        """Sort instances by the predicted end of a prompt of `prompt` tokens, or those that only decode by their work.
        Those whose decodes would break the bound with this one come last (D5)."""
        options = self._options
        works = []
        for view in views:
            work = self._work.get(view.instance)
            if work is None:
                work = self._work[view.instance] = InstanceWork(
                    view.instance,
                    pass_s=options.tbt_slo_s * (1.0 - options.headroom),
                    least_prefill=options.least_prefill,
                    balance=options.balance,
                    margin_tokens=options.margin_tokens,
                )
            work.refresh(now_s, view, COLD)
            works.append(work)
        wanted = SegmentWork(prompt, 0, 0)

        def key(work: InstanceWork) -> tuple[bool, float, float, InstanceId]:
            first_s = work.timeline.finish_of(wanted) if prefills else 0.0
            return self._full(work, slo_s, prompt), first_s, work.load_s, work.instance

        return sorted(works, key=key)

    def _full(self, work: InstanceWork, slo_s: float, context: int) -> bool:
        """Return whether, with one more decode, decodes alone take longer than the bound."""
        return work.decode_pass_s(1, context) > slo_s * (1.0 - self._options.headroom)

    def _idle(self, work: InstanceWork, slo_s: float, context: int) -> bool:
        """Return whether hardly a prompt waits there and decodes leave half the bound free."""
        return work.prefill_backlog_s <= 0.5 * slo_s and work.decode_pass_s(1, context) <= 0.5 * slo_s

    def _gain_s(self, now_s: float, choice: _Choice, unsplit: InstanceWork, whole_s: float) -> float:
        """Return the gain of this split over leaving the request whole on `unsplit`."""
        split = choice.split
        other, after_s = (choice.second, split.second_s) if unsplit is choice.first else (choice.first, split.first_s)
        requests_per_s = self._rate.per_s(now_s) if self._options.await_arrivals else 0.0
        return split_gain_s(whole_s, split.later_s, other.until_done(), after_s, requests_per_s)

    def _relieving_split(
        self, first: InstanceWork, others: list[InstanceWork], slo_s: float, whole: SegmentWork
    ) -> InstanceWork | None:
        """Return the instance that should decode this request, if its prompt is computed on `first`: the split saves
        work that is worth a KV transfer, and there are rows, blocks and time within the bound for it. None while all
        are idle; while `first` is, only the cost of mixing counts: it has time for decodes of its own."""
        idle = self._idle(first, slo_s, whole.prefill)
        options, best, best_s = self._options, None, 0.0
        alike_s = options.search_tolerance * work_seconds(first.times, whole)
        for other in others:
            cheaper_s = saved_by_moving_s(first, other, whole)
            if abs(cheaper_s) <= alike_s:
                cheaper_s = 0.0  # alike
            saved_s = (min(0.0, cheaper_s) if idle else cheaper_s) + unmixed_s(first, other, whole)
            saved_s -= self._transfer_s(first, other, whole.prefill)
            if saved_s > best_s and self._has_capacity(other, slo_s, whole):
                best, best_s = other, saved_s
        if best is not None and idle and all(self._idle(other, slo_s, whole.prefill) for other in others):
            return None
        return best

    def _handed_s(self, choice: _Choice) -> float:
        return self._transfer_s(choice.first, choice.second, choice.split.position)

    def _transfer_s(self, first: InstanceWork, second: InstanceWork, positions: int) -> float:
        """Return the least cost of a handover plus the KV's time on the measured link. Most of it travels while the
        segment computes, but on a slow link the next segment waits for this long."""
        moved_s = transfer_seconds(self._views, first.instance, second.instance, positions, unmeasured_s=0.0)
        return self._options.kv_transfer_s + moved_s

    def _has_capacity(self, work: InstanceWork, slo_s: float, whole: SegmentWork) -> bool:
        """Return whether there are rows, blocks, and time in an iteration for one more response."""
        if work.free_rows <= 0 or work.free_tokens < whole.prefill + whole.decode:
            return False
        return work.decode_pass_s(1, whole.prefill) <= _DECODES_SHARE * slo_s

    # -- one request -------------------------------------------------------------------------------------------

    def _search(self, pairs: list[tuple[InstanceWork, InstanceWork]], prompt: int, output: int) -> _Choice:
        """Return the best split of Alg. 1 over the orders of the pair."""

        def choice(first: InstanceWork, second: InstanceWork) -> _Choice:
            def ends_s(position: int) -> tuple[float, float]:
                before, after = _parts(prompt, output, position)
                return first.until_done(before), second.until_done(after)

            split = search_split(prompt, output, ends_s, probes=_PROBES, tolerance=self._options.search_tolerance)
            self._probes += split.probes
            return _Choice(first, second, split)

        return min([choice(*pair) for pair in pairs], key=lambda each: each.split.later_s)

    def _record_placed(
        self, now_s: float, request_id: RequestId, work: InstanceWork, whole: SegmentWork, reason: str
    ) -> Placed:
        predicted_s = work.timeline.finish_of(whole)
        self._rate.placed(now_s)
        work.assign(now_s, request_id, whole)
        self._whole += 1
        self._expected[request_id] = (now_s, predicted_s)
        return Placed((Segment(0, None, work.instance),), f"whole: {reason}", predicted_s)

    def _share(self, now_s: float, request_id: RequestId, choice: _Choice, whole: SegmentWork) -> Placed:
        position, total = choice.split.position, whole.prefill + whole.decode
        if min(position, total - position) < self._options.least_segment:
            larger = choice.first if 2 * position > total else choice.second
            if larger.unified:
                return self._record_placed(now_s, request_id, larger, whole, "a segment would be too short")
        first, second = _parts(whole.prefill, whole.decode, position)
        handed_s = choice.first.timeline.finish_of(first) + self._handed_s(choice)
        predicted_s = choice.second.timeline.finish_of(second, handed_s)
        self._rate.placed(now_s)
        choice.first.assign(now_s, request_id, first)
        choice.second.assign(now_s, request_id, second)
        self._splits += 1
        self._expected[request_id] = (now_s, predicted_s)
        where = "in the prompt" if position < whole.prefill else "at its end"
        where = "in the output" if position > whole.prefill else where
        segments = (Segment(0, position, choice.first.instance), Segment(position, None, choice.second.instance))
        return Placed(segments, f"split {where}", predicted_s)


def _parts(prompt: int, output: int, position: int) -> tuple[SegmentWork, SegmentWork]:
    """D1 · Return the work of [0, s) and of [s, P + O^). Position p yields the token at p + 1, so the first segment
    draws s − P + 1 tokens if it reaches the prompt's end."""
    if position < prompt:
        return SegmentWork(position, 0, 0), SegmentWork(prompt - position, position, output)
    sampled = position - prompt
    return SegmentWork(prompt, 0, sampled), SegmentWork(0, position, output - sampled)
