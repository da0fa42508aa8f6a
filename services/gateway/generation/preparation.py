"""A parsed call and its tokenised prompts to the requests that workers serve: one per prompt and choice.

Pure; called by `generator.py` after tokenising. Decides output lengths within the model's context, end tokens, seeds
and request ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError
from cohort.common.types import Attempt, InstanceId, Request
from cohort.services.gateway.requests.model_card import ModelCard
from cohort.services.gateway.requests.parsing import Call

SEED_MASK = (1 << 63) - 1


def prepare(
    call: Call,
    prompts: Sequence[list[int]],
    *,
    base_id: str,
    gateway: InstanceId,
    seed: int,
    arrival_s: float,
    card: ModelCard,
    max_tokens_of: Sequence[int],
) -> list[Request]:
    """Requests in the order of their choices: all of the first prompt, all of the second, …

    `seed`: the client's, or a random one. `max_tokens_of`: as `output_limits` says, one for each prompt.
    """
    stop_ids = set(call.stop_token_ids)
    if not call.ignore_eos:
        stop_ids.update(card.eos_token_ids)
    # Built once; every choice refers to the same biases, stop tokens and prompt.
    sampling = msgspec.structs.replace(call.sampling, stop_token_ids=tuple(sorted(stop_ids)))
    total = len(prompts) * call.n
    requests: list[Request] = []
    for prompt, max_tokens in zip(prompts, max_tokens_of, strict=True):
        for choice in range(call.n):
            # Its first choice scores a prompt, for all of them: while it is computed, which ends with a token, wanted
            # or not.
            scores = call.scores_prompt and choice == 0
            index = len(requests)
            requests.append(
                Request(
                    attempt=Attempt(base_id if total == 1 else f"{base_id}-{index}", 0),
                    gateway=gateway,
                    tokens=prompt,
                    prompt_tokens=len(prompt),
                    sampling=msgspec.structs.replace(
                        sampling,
                        max_tokens=max(1, max_tokens) if scores else max_tokens,
                        prompt_logprobs=call.prompt_scores if scores else -1,
                        seed=derived_seed(seed, index),
                    ),
                    arrival_s=arrival_s,
                    traffic_class=call.traffic_class,
                    online=call.online,
                    priority=call.priority,
                    slo=call.slo,
                    if_late=call.if_late,
                    adapter=call.adapter,
                )
            )
    return requests


def output_limits(
    call: Call, prompt_tokens: Sequence[int], config: GatewayConfig, max_model_len: int, card_limit: int = 0
) -> list[int]:
    """How many tokens the answers to prompts of so many tokens may have. `card_limit`: of a chat that names no limit,
    where the configuration has none either; 0 = what the context leaves. Raises `RequestError` when a prompt and its
    answer exceed the context."""
    limit = config.default_max_tokens or card_limit
    return [_output_limit(call, tokens, limit, max_model_len) for tokens in prompt_tokens]


def derived_seed(seed: int, index: int) -> int:
    """The first choice has the client's own seed; the others independent ones that depend on it and their index."""
    if index == 0:
        return seed & SEED_MASK
    digest = hashlib.blake2b(f"{seed & SEED_MASK}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & SEED_MASK


def _output_limit(call: Call, prompt_tokens: int, default_limit: int, max_model_len: int) -> int:
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
    limit = min(headroom, default_limit) if default_limit else headroom
    if call.min_tokens > limit:
        raise RequestError(f"min_tokens ({call.min_tokens}) exceeds the {limit} tokens that fit.", param="min_tokens")
    return limit
