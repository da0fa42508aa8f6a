"""What alignment could gain at most: by hand, then what must hold of any kernel."""

from __future__ import annotations

import pytest

from cohort.common.policies.cost_model import CostModel, StepWork
from cohort.services.simulator.figures.alignedserve import _tokens_per_s, ceiling
from cohort.services.simulator.hardware.hardware import load_cluster, load_model


def test_full_batches_by_hand() -> None:
    cluster = load_cluster("h100-80")
    cost = CostModel(load_model("opt-2.7b"), cluster.device, cluster.stack)
    # 350 positions hold three rows of 100 and not four.
    step_s = cost.step_s(StepWork(3, 3, 3, decode_rows=3, decode_context=300, longest_context=100))
    assert _tokens_per_s(cost, [(1.0, [100])], 350.0) == pytest.approx(3 / step_s)


def test_leaving_out_the_long_ones_gains_and_serving_all_alike_does_not() -> None:
    for attention in ("split_kv", "unit_per_row"):
        assert ceiling("opt-13b", attention, fair=False) > 1.1
        assert ceiling("opt-13b", attention, fair=True) == pytest.approx(1.0, abs=0.03)
    assert ceiling("opt-13b", "unit_last", fair=True) > ceiling("opt-13b", "split_kv", fair=True)
