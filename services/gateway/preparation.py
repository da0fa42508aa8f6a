"""A parsed call and its tokenised prompts to the requests that workers serve: one per prompt and choice.

Pure; called by `openai_api.py` after tokenising. Decides output lengths within the model's context, end tokens, seeds
and request ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError
from cohort.common.types import Attempt, InstanceId, Request
from cohort.services.gateway.model_card import ModelCard
from cohort.services.gateway.parsing import Call

SEED_MASK = (1 << 63) - 1


def prepare(
    call: Call,
    prompts: Sequence[list[int]],
    *,
    base_id: str,
    gateway: InstanceId,
    seed: int,
    arrival_s: float,
    config: GatewayConfig,
    card: ModelCard,
    max_model_len: int,
) -> list[Request]:
    """Requests in the order of their choices: all of the first prompt, all of the second, …

    `seed`: the client's, or a random one. Raises `RequestError` when a prompt and its answer exceed the context.
    """
    stop_ids = set(call.stop_token_ids)
    if not call.ignore_eos:
        stop_ids.update(card.eos_token_ids)
    total = len(prompts) * call.n
    requests: list[Request] = []
    for prompt in prompts:
        max_tokens = _output_limit(call, len(prompt), config, max_model_len)
        for _ in range(call.n):
            index = len(requests)
            requests.append(
                Request(
                    attempt=Attempt(base_id if total == 1 else f"{base_id}-{index}", 0),
                    gateway=gateway,
                    tokens=prompt,
                    prompt_tokens=len(prompt),
                    sampling=msgspec.structs.replace(
                        call.sampling,
                        # A prompt is scored while it is computed, which ends with a token, wanted or not.
                        max_tokens=max(1, max_tokens) if call.scores_prompt else max_tokens,
                        prompt_logprobs=call.sampling.logprobs if call.scores_prompt else -1,
                        seed=derived_seed(seed, index),
                        stop_token_ids=tuple(sorted(stop_ids)),
                    ),
                    arrival_s=arrival_s,
                    traffic_class=call.traffic_class,
                    online=call.online,
                    priority=call.priority,
                    slo=call.slo,
                )
            )
    return requests


def derived_seed(seed: int, index: int) -> int:
    """The first choice has the client's own seed; the others independent ones that depend on it and their index."""
    if index == 0:
        return seed & SEED_MASK
    digest = hashlib.blake2b(f"{seed & SEED_MASK}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & SEED_MASK


def _output_limit(call: Call, prompt_tokens: int, config: GatewayConfig, max_model_len: int) -> int:
    param = "messages" if call.chat else "prompt"
    if not prompt_tokens:
        raise RequestError("The prompt is empty: it has no tokens.", param=param)
    headroom = max_model_len - prompt_tokens
    if headroom < (0 if call.max_tokens == 0 else 1):
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt alone has "
            f"{prompt_tokens} tokens.",
            param=param,
        )
    if call.max_tokens is not None:
        if call.max_tokens > headroom:
            raise RequestError(
                f"This model's maximum context length is {max_model_len} tokens, but {prompt_tokens + call.max_tokens} "
                f"were requested: {prompt_tokens} in the prompt and {call.max_tokens} for the answer.",
                param=param,
            )
        return call.max_tokens
    limit = min(headroom, config.default_max_tokens) if config.default_max_tokens else headroom
    if call.min_tokens > limit:
        raise RequestError(f"min_tokens ({call.min_tokens}) exceeds the {limit} tokens that fit.", param="min_tokens")
    return limit
