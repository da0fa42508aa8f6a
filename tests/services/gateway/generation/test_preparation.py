from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError
from cohort.common.types import Attempt, Request, SamplingParams, Slo
from cohort.services.gateway.generation.preparation import SEED_MASK, derived_seed, output_limits, prepare
from cohort.services.gateway.requests.model_card import ModelCard
from cohort.services.gateway.requests.parsing import Call

CARD = ModelCard("tiny", Path("/m"), 100, 50, (2, 4))
CALL = Call(
    chat=False,
    prompts=("x",),
    messages=[],
    sampling=SamplingParams(max_tokens=0, top_k=3),
    max_tokens=10,
    max_tokens_field="max_tokens",
    min_tokens=0,
    n=1,
    seed=None,
    stop_strings=(),
    stop_token_ids=(9,),
    ignore_eos=False,
    traffic_class="be",
    slo=Slo(1.0),
    priority=2,
    online=False,
)


def prepared(
    prompts: list[list[int]], *, context: int = 100, config: GatewayConfig | None = None, **changes: Any
) -> list[Request]:
    call = msgspec.structs.replace(CALL, **changes)
    limits = output_limits(call, [len(prompt) for prompt in prompts], config or GatewayConfig(), context)
    return prepare(call, prompts, base_id="id", gateway="gw", seed=77, arrival_s=5.0, card=CARD, token_limits=limits)


def test_one_request_is_complete() -> None:
    assert prepared([[1, 2]]) == [
        Request(
            Attempt("id", 0),
            "gw",
            [1, 2],
            2,
            SamplingParams(max_tokens=10, top_k=3, seed=77, stop_token_ids=(2, 4, 9)),
            5.0,
            "be",
            False,
            2,
            Slo(1.0),
        )
    ]


def test_choices_are_requests_of_their_own() -> None:
    requests = prepared([[1], [3]], n=2)
    assert [request.request_id for request in requests] == ["id-0", "id-1", "id-2", "id-3"]
    assert [request.tokens for request in requests] == [[1], [1], [3], [3]]
    assert len({request.sampling.seed for request in requests}) == 4


def test_ignoring_the_end_keeps_the_clients_own_stop_tokens() -> None:
    assert prepared([[1]], ignore_eos=True)[0].sampling.stop_token_ids == (9,)


def test_seeds_depend_on_seed_and_index_only() -> None:
    assert derived_seed(5, 0) == 5
    assert derived_seed(5, 1) == derived_seed(5, 1) != derived_seed(6, 1)
    assert 0 <= derived_seed(-1, 0) <= SEED_MASK


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "named"),
    [(100, 10, ["100 tokens"]), (120, None, ["100 tokens", "120 tokens"]), (95, 6, ["100 tokens", "101", "95", "6"])],
)
def test_a_request_beyond_the_context_names_both_numbers(tokens: int, max_tokens: int | None, named: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        prepared([[1] * tokens], max_tokens=max_tokens)
    param = "prompt" if len(named) < 4 else "max_tokens"
    assert (caught.value.status, caught.value.param) == (400, param)
    assert all(text in caught.value.message for text in named)


def test_the_context_may_be_filled_to_the_last_token() -> None:
    assert prepared([[1] * 90])[0].sampling.max_tokens == 10
    assert prepared([[1] * 99], max_tokens=None)[0].sampling.max_tokens == 1
    assert prepared([[1] * 100], max_tokens=0)[0].sampling.max_tokens == 0


def test_without_a_limit_the_context_or_the_configured_default_decides() -> None:
    assert prepared([[1] * 10], max_tokens=None)[0].sampling.max_tokens == 90
    config = GatewayConfig(default_max_tokens=30)
    assert prepared([[1] * 10], max_tokens=None, config=config)[0].sampling.max_tokens == 30
    assert prepared([[1] * 90], max_tokens=None, config=config)[0].sampling.max_tokens == 10


def test_min_tokens_must_fit() -> None:
    with pytest.raises(RequestError, match="min_tokens"):
        prepared([[1] * 98], max_tokens=None, min_tokens=5)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        prepared([[]])
