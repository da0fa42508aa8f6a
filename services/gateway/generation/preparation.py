"""A parsed call and its tokenised prompts to the requests that workers serve, and what these cost.

    after parsing      choices, biases, stop strings, and the tokens its prompts have at least    `check`
    after tokenising   the same with the tokens they have                                          `price`
    while it is open   what it holds beyond a plain request, together with all others'             `reserve`

`prepare` makes one request per prompt and choice. It decides output lengths within the model's context, end tokens,
seeds and request ids.

The price of a request is in units of work, from counts alone. A unit is a token that is computed or a score that is
sent: the prompt's tokens for each choice, the answers' tokens times one plus the scores each carries, the same of an
echoed prompt, and all else that travels with every choice (`CHOICE_UNITS` for the choice itself). It costs a worker
about as much as a token and the gateway less than a hundred bytes, so one limit bounds both. Nothing is built before a
request has passed: a price is a few multiplications.

Called by `generator.py`; knows nothing of HTTP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from cohort.common.config import GatewayConfig
from cohort.common.errors import TOO_LONG, RequestError, busy
from cohort.common.tokens import PackedTokens
from cohort.common.types import Attempt, InstanceId, Prediction, Request
from cohort.services.gateway import bounds
from cohort.services.gateway.requests.model_card import ModelCard
from cohort.services.gateway.requests.parsing import Call

SEED_MASK = (1 << 63) - 1
# Others' answers have to end before there is headroom again; when that will be is unknown.
_RETRY_AFTER_S = 1.0
# A choice's cost beside its tokens: a record at the gateway, the manager and a worker, a few messages.
CHOICE_UNITS = 64
# It travels with every choice, and a worker compiles it; its masks cost less than the tokens they are for.
_GRAMMAR_CHARACTERS_PER_UNIT = 16
# Of an embedding: some 25 bytes each, as states and as text.
_NUMBERS_PER_UNIT = 4
_ONE_TOKEN = Prediction(1.0, 1.0, 1.0, 1.0)


def prepare(
    call: Call,
    prompts: Sequence[list[int]],
    *,
    base_id: str,
    gateway: InstanceId,
    seed: int,
    arrival_s: float,
    card: ModelCard,
    token_limits: Sequence[int],
) -> list[Request]:
    """Build the requests in the order of their choices: all of the first prompt, all of the second, …

    `seed`: the client's, or a random one. `token_limits`: by prompt, from `output_limits`.
    """
    stop_ids = set(call.stop_token_ids)
    if not call.ignore_eos:
        stop_ids.update(card.eos_token_ids)
    # Built once; every choice refers to the same biases, stop tokens and prompt.
    sampling = msgspec.structs.replace(call.sampling, stop_token_ids=tuple(sorted(stop_ids)))
    adapter, folder = card.reference(call.adapter)
    total, pools = len(prompts) * call.n, sampling.pooling != ""
    requests: list[Request] = []
    for prompt, max_tokens in zip(map(PackedTokens, prompts), token_limits, strict=True):
        for choice in range(call.n):
            # Its first choice scores a prompt, for all of them: while it is computed, which ends with a token, wanted
            # or not. So does an embedding's.
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
                        max_tokens=max(1, max_tokens) if scores or pools else max_tokens,
                        prompt_logprobs=call.prompt_scores if scores else -1,
                        seed=derived_seed(seed, index),
                    ),
                    arrival_s=arrival_s,
                    traffic_class=call.traffic_class,
                    online=call.online,
                    priority=call.priority,
                    slo=call.slo,
                    if_late=call.if_late,
                    adapter=adapter,
                    adapter_folder=folder,
                    choices=total,
                    prediction=_ONE_TOKEN if pools else None,
                )
            )
    return requests


def output_limits(
    call: Call, prompt_tokens: Sequence[int], config: GatewayConfig, max_model_len: int, card_limit: int = 0
) -> list[int]:
    """Return the answers' token limits. `card_limit` is for chats where nothing else is named; 0 leaves the rest of the
    context. Raises `RequestError` when a prompt and its answer exceed the context."""
    limit = config.default_max_tokens or card_limit
    return [_output_limit(call, tokens, limit, max_model_len) for tokens in prompt_tokens]


def derived_seed(seed: int, index: int) -> int:
    """Return a choice's seed: the client's own for the first, others derived from it and the index."""
    if index == 0:
        return seed & SEED_MASK
    digest = hashlib.blake2b(f"{seed & SEED_MASK}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & SEED_MASK


def _output_limit(call: Call, prompt_tokens: int, default_limit: int, max_model_len: int) -> int:
    param = "messages" if call.chat else "prompt"
    if not prompt_tokens:
        raise RequestError("The prompt is empty: it has no tokens.", param=param)
    headroom = max_model_len - prompt_tokens
    if headroom < (0 if call.max_tokens == 0 and not call.sampling.pooling else 1):
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt alone has "
            f"{prompt_tokens} tokens.",
            param=param,
            code=TOO_LONG,
        )
    if call.max_tokens is not None:
        if call.max_tokens > headroom:
            raise RequestError(
                f"This model's maximum context length is {max_model_len} tokens, but {prompt_tokens + call.max_tokens} "
                f"were requested: {prompt_tokens} in the prompt and {call.max_tokens} for the answer.",
                param=call.max_tokens_field,
                code=TOO_LONG,
            )
        return call.max_tokens
    limit = min(headroom, default_limit) if default_limit else headroom
    if call.min_tokens > limit:
        raise RequestError(f"min_tokens ({call.min_tokens}) exceeds the {limit} tokens that fit.", param="min_tokens")
    return limit


@dataclass(frozen=True, slots=True)
class Price:
    """Units by cause. `plain`: those of the first choice alone without scores; any number of these may be open."""

    choices: int
    prompt: int
    answer: int
    echo: int
    vectors: int
    biases: int
    stops: int
    grammar: int
    plain: int

    @property
    def total(self) -> int:
        of_answers = self.answer + self.echo + self.vectors
        return self.choices + self.prompt + of_answers + self.biases + self.stops + self.grammar

    @property
    def beyond_plain(self) -> int:
        return self.total - self.plain


class Reservation:
    """One open request's part of the budget."""

    def __init__(self, budget: RequestBudget, units: int) -> None:
        self._budget = budget
        self._units = units

    def release(self) -> None:
        """Release the units. Harmless when repeated."""
        units, self._units = self._units, 0
        self._budget.give_back(units)


class RequestBudget:
    def __init__(self, config: GatewayConfig, least_tokens: Callable[[str], int], vector_width: int = 0) -> None:
        """`least_tokens`: a lower bound on a text's tokens. `vector_width`: numbers of an embedding."""
        self._vector_width = vector_width
        self._config = config
        self._most = config.own_open_work
        self._least_in = least_tokens
        self._open = 0

    @property
    def open_units(self) -> int:
        return self._open

    def check(self, call: Call) -> None:
        """Refuse before tokenising what no number of tokens makes right, by a `RequestError`."""
        pools = call.sampling.pooling != ""
        if call.choices > (most := bounds.BOUNDS.inputs if pools else bounds.BOUNDS.choices):
            prompts = len(call.prompts)
            what = f"{prompts} prompts × n {call.n}" if prompts > 1 else f"n {call.n}"
            raise RequestError(
                f"{what} are {call.choices} choices, but one request may have {most}.",
                param="n" if call.n > 1 else "prompt",
            )
        least = [self._least_tokens(prompt) for prompt in call.prompts] or [1]
        self._refuse_too_much(call, self._price(call, least, [call.max_tokens or 0] * len(least)))

    def price(self, call: Call, prompt_tokens: Sequence[int], max_tokens: Sequence[int]) -> Price:
        """Price a request by its prompts' tokens and its answers' limits. Raises `RequestError` beyond the limit."""
        price = self._price(call, prompt_tokens, max_tokens)
        self._refuse_too_much(call, price)
        return price

    def reserve(self, price: Price) -> Reservation:
        """Reserve until the request ends. Raises a 429 `RequestError` while others hold too much."""
        units, most = price.beyond_plain, self._most
        if units and self._open + units > most:
            if units > most:
                raise RequestError(
                    f"This request holds {units} units of work beyond one plain answer, but all open requests together "
                    f"may hold {most} (gateway.max_open_work{self._config.of_all})."
                )
            raise busy(
                f"The server is busy: this request would hold {units} units of work beyond one plain answer; open ones "
                f"hold {self._open} of {most} (gateway.max_open_work{self._config.of_all}). Please retry later.",
                _RETRY_AFTER_S,
            )
        self._open += units
        return Reservation(self, units)

    def give_back(self, units: int) -> None:
        self._open -= units

    def _least_tokens(self, prompt: str | list[int]) -> int:
        return max(1, self._least_in(prompt)) if isinstance(prompt, str) else len(prompt)

    def _price(self, call: Call, prompt_tokens: Sequence[int], max_tokens: Sequence[int]) -> Price:
        tokens, scores = sum(prompt_tokens), _scores_per_token(call)
        return Price(
            choices=call.choices * CHOICE_UNITS,
            prompt=call.n * tokens,
            answer=call.n * sum(max_tokens) * (1 + scores),
            vectors=call.choices * -(-self._vector_width // _NUMBERS_PER_UNIT) if call.sampling.pooling else 0,
            echo=call.n * tokens * (2 + call.prompt_scores) if call.scores_prompt else 0,
            biases=call.choices * len(call.sampling.logit_bias),
            stops=call.choices * len(call.stop_token_ids) + sum(map(len, call.stop_strings)),
            grammar=call.choices * len(call.sampling.grammar) // _GRAMMAR_CHARACTERS_PER_UNIT,
            plain=CHOICE_UNITS + prompt_tokens[0] + max_tokens[0],
        )

    def _refuse_too_much(self, call: Call, price: Price) -> None:
        most = self._config.max_request_work
        if price.total <= most:
            return
        largest, (figure, what, param) = max(_parts(call, price).items(), key=lambda part: part[1][0])
        raise RequestError(
            f"This request asks for {price.total} units of work, but one may ask for {most} "
            f"(gateway.max_request_work). The largest part is {largest}: {what} = {figure}.",
            param=param,
        )


def _scores_per_token(call: Call) -> int:
    return call.sampling.logprobs + 1


def _parts(call: Call, price: Price) -> dict[str, tuple[int, str, str]]:
    """Return for each part of the price its size, its formula and the parameter to lower."""
    scores, chat = _scores_per_token(call), call.chat
    each = f" × (1 + {scores} log-probabilities)" if scores else ""
    answers = price.answer // (1 + scores)
    prompts = price.prompt // call.n
    names = ("messages", "top_logprobs") if chat else ("prompt", "logprobs")
    return {
        "the choices": (price.choices, f"{call.choices} choices × {CHOICE_UNITS}", "n" if call.n > 1 else names[0]),
        "the prompts": (price.prompt, f"n {call.n} × {prompts} tokens", "n" if call.n > 1 else names[0]),
        "the answers": (
            price.answer,
            f"n {call.n} × max_tokens {answers // call.n}{each}",
            "n" if call.n > 1 else names[1] if scores > 1 else call.max_tokens_field,
        ),
        "the echo": (
            price.echo,
            f"n {call.n} × {prompts} tokens × (2 + {call.prompt_scores} log-probabilities)",
            "n" if call.n > 1 else "logprobs" if call.scores_echo else "prompt_logprobs",
        ),
        "the embeddings": (price.vectors, f"the numbers of {call.choices} embeddings / {_NUMBERS_PER_UNIT}", "prompt"),
        "logit_bias": (price.biases, f"{call.choices} choices × {len(call.sampling.logit_bias)} biases", "logit_bias"),
        "the grammar": (
            price.grammar,
            f"{call.choices} choices × {len(call.sampling.grammar)} characters / {_GRAMMAR_CHARACTERS_PER_UNIT}",
            call.grammar_spec.param if call.grammar_spec is not None else names[0],
        ),
        "stop": (price.stops, f"{call.choices} choices × stop tokens + characters of stop strings", "stop"),
    }
