"""Placement, thresholds and patience: small rules by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cohort.common.config import load_config
from cohort.common.errors import ConfigError
from cohort.common.policies import compose
from cohort.common.policies.alignedserve.late_bound import LateBound
from cohort.common.policies.alignedserve.thresholds import Thresholds, patience_s
from cohort.common.policies.interface import ClusterView, Placed, WaitingRequest
from cohort.common.policies.settings import AlignedServeSettings
from cohort.common.types import Prediction, Role, Segment
from tests.common.policies.alignedserve.pool import cluster, request, view


def place(state: ClusterView) -> tuple[Segment, ...]:
    placed = LateBound(AlignedServeSettings(least_requests=4)).place(
        0.0, WaitingRequest(request("a", 20), 0.0, None), state, None
    )
    assert isinstance(placed, Placed)
    return placed.segments


def test_where_few_run_it_is_bound_at_once() -> None:
    state = cluster(view("prefill-0", Role.PREFILL), view("decode-0", Role.DECODE, running=3))
    assert place(state) == (Segment(0, 20, "prefill-0"), Segment(20, None, "decode-0"))


@pytest.mark.parametrize("stats", [{"running": 4}, {"free_blocks": 40}, {"parked": 1}])
def test_elsewhere_it_waits_for_its_batch(stats: dict[str, int]) -> None:
    state = cluster(view("prefill-0", Role.PREFILL), view("decode-0", Role.DECODE, **stats))
    assert place(state) == (Segment(0, 20, "prefill-0"), Segment(20, None, None))


def test_without_decode_workers_it_stays_where_its_prompt_is() -> None:
    assert place(cluster(view("prefill-0", Role.PREFILL))) == (Segment(0, None, "prefill-0"),)


def test_thresholds_follow_the_device() -> None:
    capacity = view("decode-0", Role.DECODE).capacity
    assert Thresholds(AlignedServeSettings()).max_blocks(capacity) == 40
    assert Thresholds(AlignedServeSettings()).min_requests(replace(capacity, max_rows=256)) == 36, (
        "the paper's, on the paper's devices"
    )
    assert Thresholds(AlignedServeSettings()).min_requests(capacity) == 9
    assert Thresholds(AlignedServeSettings(least_requests=1000)).min_requests(capacity) == 64


def test_patience_is_a_share_of_the_responses_tpot_allowance() -> None:
    with_slo = request("a", tpot_s=0.1, max_tokens=50)
    rules = {"share": 0.5, "longest_s": 10.0, "default_output": 256.0}
    assert patience_s(with_slo, **rules) == pytest.approx(0.5 * 0.1 * 50)
    predicted = replace(with_slo, prediction=Prediction(20.0, 20.0, 20.0, 20.0))
    assert patience_s(predicted, **rules) == pytest.approx(0.5 * 0.1 * 20)
    begun = replace(predicted, tokens=[*predicted.tokens, *[1] * 15])  # an attempt before this one got so far
    assert begun.output_known == 15
    assert patience_s(begun, **rules) == pytest.approx(0.5 * 0.1 * 5)
    assert patience_s(request("b"), **rules) == 10.0
    assert patience_s(request("c", tpot_s=9.0), **rules) == 10.0


def test_a_late_bound_segment_needs_a_binding_policy() -> None:
    with pytest.raises(ConfigError, match="waiting_kv aligned"):
        compose.check_names(load_config(preset="alignedserve", overrides={"policies": {"waiting_kv": "none"}}))
