from __future__ import annotations

import pytest

from cohort.common.machines.entry import Entry
from cohort.common.messages import StageTimes
from cohort.common.types import Attempt, Request, SamplingParams, Slo
from cohort.services.gateway.generation.delta import GatewayTimes, slo_outcomes, tpot_s, ttft_stages


def entry(**fields: object) -> Entry:
    made = Entry(Request(Attempt("r", 0), "g", [1], 1, SamplingParams(max_tokens=9), 0.0), opened_s=1.0, expires_s=9.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_the_stages_add_up_to_the_time_to_first_token() -> None:
    one = entry(
        first_token_s=2.0,
        predict_s=0.02,
        bucket_s=0.1,
        first_times=StageTimes(queue_s=0.2, prefill_s=0.3, transfer_s=0.05),
    )
    stages = ttft_stages(GatewayTimes(arrived_s=1.0, tokenize_s=0.01), one)
    assert stages == pytest.approx(
        {
            "tokenize": 0.01,
            "predict": 0.02,
            "bucket": 0.1,
            "prefill_queue": 0.2,
            "prefill": 0.3,
            "transfer": 0.05,
            "first_decode": 0.32,
        }
    )
    assert sum(stages.values()) == pytest.approx(1.0)


def test_before_the_first_token_there_is_nothing_to_split() -> None:
    assert ttft_stages(GatewayTimes(0.0), entry()) == {}


def test_time_per_output_token_needs_two() -> None:
    assert tpot_s(entry(first_token_s=1.0, last_token_s=1.0, output=[1])) is None
    assert tpot_s(entry(first_token_s=1.0, last_token_s=4.0, output=[1, 2, 3, 4])) == 1.0


def test_slos_attained_and_missed() -> None:
    slo = Slo(1.0, 0.1, 5.0)
    assert slo_outcomes(slo, ttft_s=1.0, per_token_s=0.2, e2e_s=4.0) == {"ttft": True, "tpot": False, "deadline": True}
    assert slo_outcomes(slo, ttft_s=None, per_token_s=None, e2e_s=None) == {
        "ttft": False,
        "tpot": False,
        "deadline": False,
    }
    assert slo_outcomes(slo, ttft_s=0.5, per_token_s=None, e2e_s=0.5) == {"ttft": True, "deadline": True}
    assert slo_outcomes(Slo(), ttft_s=9.0, per_token_s=9.0, e2e_s=9.0) == {}
