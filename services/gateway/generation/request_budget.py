"""The cost of one request: its price in units of work, from counts alone, and the limits it must keep.

    after parsing      choices, biases, stop strings, and the tokens its prompts have at least    `check`
    after tokenising   the same with the tokens they have                                          `price`
    while it is open   what it holds beyond a plain request, together with all others'             `reserve`

A unit is a token that is computed or a score that is told: the prompt's tokens for each choice, the answers' tokens
times one plus the scores each carries, the same of an echoed prompt, and all else that travels with every choice
(`CHOICE_UNITS` for the choice itself). It costs a worker about as much as a token and the gateway less than a hundred
bytes, so one limit bounds both. Nothing is built before a request has passed: a price is a few multiplications. Called
by `generator.py`; knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError
from cohort.services.gateway.requests.parsing import Call

# Others' answers have to end before there is headroom again; nothing tells when.
_RETRY_AFTER_S = 1.0
# A choice's cost beside its tokens: a record at the gateway, the manager and a worker, a few messages.
CHOICE_UNITS = 64
# It travels with every choice, and a worker compiles it; its masks cost less than the tokens they are for.
_GRAMMAR_CHARACTERS_PER_UNIT = 16
# JSON's longest spelling of one byte of text: backslash, u and four digits.
_BYTES_PER_CHARACTER = 6
# Of a body, beside its prompts.
_OTHER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Price:
    """Units by cause. `plain`: those of the first choice alone without scores; any number of these may be open."""

    choices: int
    prompt: int
    answer: int
    echo: int
    biases: int
    stops: int
    grammar: int
    plain: int

    @property
    def total(self) -> int:
        return self.choices + self.prompt + self.answer + self.echo + self.biases + self.stops + self.grammar

    @property
    def beyond_plain(self) -> int:
        return self.total - self.plain


class Reservation:
    """One open request's part of the budget."""

    def __init__(self, budget: RequestBudget, units: int) -> None:
        self._budget = budget
        self._units = units

    def release(self) -> None:
        """The request has ended. Harmless when repeated."""
        units, self._units = self._units, 0
        self._budget.give_back(units)


class RequestBudget:
    def __init__(self, config: GatewayConfig, longest_token: int) -> None:
        """`longest_token`: characters a token has at most; 0 = a text's length says nothing about its tokens."""
        self._config = config
        self._longest_token = longest_token
        self._open = 0

    @property
    def open_units(self) -> int:
        """Units reserved now."""
        return self._open

    def check_body(self, body_bytes: int, *, chat: bool, max_model_len: int) -> None:
        """Before decoding. Raises `RequestError` for a body whose prompts cannot fit however they are cut."""
        tokens = max_model_len if chat else max(max_model_len, self._config.max_request_work)
        most = tokens * self._longest_token * _BYTES_PER_CHARACTER + _OTHER_BYTES
        if self._longest_token and body_bytes > most:
            limit = (
                f"this model's maximum context length is {max_model_len} tokens"
                if chat
                else f"the prompts of one request may have {tokens} tokens (gateway.max_request_work)"
            )
            raise RequestError(
                f"The body has {body_bytes} bytes, but {limit}: {most} bytes at most.",
                param="messages" if chat else "prompt",
            )

    def check(self, call: Call) -> None:
        """Before tokenising. Raises `RequestError` for what no number of tokens makes right."""
        config = self._config
        if call.choices > config.max_choices:
            prompts = len(call.prompts)
            what = f"{prompts} prompts × n {call.n}" if prompts > 1 else f"n {call.n}"
            raise RequestError(
                f"{what} are {call.choices} choices, but one request may have {config.max_choices} "
                "(gateway.max_choices).",
                param="n" if call.n > 1 else "prompt",
            )
        least = [self._least_tokens(prompt) for prompt in call.prompts] or [1]
        self._refuse_too_much(call, self._price(call, least, [call.max_tokens or 0] * len(least)))

    def price(self, call: Call, prompt_tokens: Sequence[int], max_tokens: Sequence[int]) -> Price:
        """With the tokens that prompts have and answers may have. Raises `RequestError` beyond the limit."""
        price = self._price(call, prompt_tokens, max_tokens)
        self._refuse_too_much(call, price)
        return price

    def reserve(self, price: Price) -> Reservation:
        """To be released when the request ends. Raises a 429 `RequestError` as long as others hold too much."""
        units, most = price.beyond_plain, self._config.own_open_work
        if units and self._open + units > most:
            if units > most:
                raise RequestError(
                    f"This request holds {units} units of work beyond one plain answer, but all open requests together "
                    f"may hold {most} (gateway.max_open_work{self._config.of_all})."
                )
            raise RequestError(
                f"The server is busy: this request would hold {units} units of work beyond one plain answer; open ones "
                f"hold {self._open} of {most} (gateway.max_open_work{self._config.of_all}). Please retry later.",
                status=429,
                type_="rate_limit_error",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._open += units
        return Reservation(self, units)

    def give_back(self, units: int) -> None:
        self._open -= units

    def _least_tokens(self, prompt: str | list[int]) -> int:
        if isinstance(prompt, str):
            return max(1, len(prompt) // self._longest_token) if self._longest_token else 1
        return len(prompt)

    def _price(self, call: Call, prompt_tokens: Sequence[int], max_tokens: Sequence[int]) -> Price:
        tokens, scores = sum(prompt_tokens), _scores_per_token(call)
        return Price(
            choices=call.choices * CHOICE_UNITS,
            prompt=call.n * tokens,
            answer=call.n * sum(max_tokens) * (1 + scores),
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
    """Its own and the likeliest ones'."""
    return call.sampling.logprobs + 1


def _parts(call: Call, price: Price) -> dict[str, tuple[int, str, str]]:
    """Figure, how it comes about, and the parameter to lower."""
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
            "n" if call.n > 1 else names[1] if scores > 1 else "max_tokens",
        ),
        "the echo": (
            price.echo,
            f"n {call.n} × {prompts} tokens × (2 + {call.prompt_scores} log-probabilities)",
            "n" if call.n > 1 else "logprobs" if call.scores_echo else "prompt_logprobs",
        ),
        "logit_bias": (price.biases, f"{call.choices} choices × {len(call.sampling.logit_bias)} biases", "logit_bias"),
        "the grammar": (
            price.grammar,
            f"{call.choices} choices × {len(call.sampling.grammar)} characters / {_GRAMMAR_CHARACTERS_PER_UNIT}",
            call.wanted.param if call.wanted is not None else names[0],
        ),
        "stop": (price.stops, f"{call.choices} choices × stop tokens + characters of stop strings", "stop"),
    }
