"""The prompt of a completion in its four shapes: a text, texts, token ids, lists of token ids.

Called by `parsing.py`. Half a million ids decode in tens of milliseconds, in which no other thread runs; so a long
field is decoded one prompt at a time, and a list with more ids than the model's context not at all. Pure.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from cohort.common.config import GatewayConfig
from cohort.common.errors import TOO_LONG, RequestError
from cohort.services.gateway.http.bodies import TokenId
from cohort.services.gateway.requests.model_card import ModelCard

DECODED_AT_ONCE_BYTES = 65_536
"""A field up to here is decoded as one."""

Shapes = str | list[str | int | list[TokenId]]
Decoded = TypeVar("Decoded")

_any = msgspec.json.Decoder(Shapes)
_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(list[TokenId])


def prompts(field: bytes, config: GatewayConfig, card: ModelCard) -> tuple[str | list[int], ...]:
    """Return one or more prompts, none empty. Raises `RequestError`, and msgspec's errors for invalid UTF-8."""
    if len(field) <= DECODED_AT_ONCE_BYTES:
        return _prompts(_decode(_any, field, "prompt"), config, card)
    if field.startswith(b'"'):
        return (_decode(_text, field, "prompt"),)
    match field[1 : 1 + DECODED_AT_ONCE_BYTES].lstrip()[:1]:
        case b"[":
            return _lists(field, config, card)
        case b'"':
            try:
                return tuple(_few_enough(_texts.decode(field), config))
            except msgspec.ValidationError as error:
                raise _mixed() from error
        case _:
            _refuse_too_many(field, card)
            return _prompts(_decode(_any, field, "prompt"), config, card)


def _lists(field: bytes, config: GatewayConfig, card: ModelCard) -> tuple[list[int], ...]:
    """Cut at its brackets: between two lists there is a comma and nothing else."""
    if b'"' in field:
        raise _mixed()
    *lists, end = field[1:-1].split(b"]")
    found: list[list[int]] = []
    for number, text in enumerate(_few_enough(lists, config)):
        between, bracket, ids = text.partition(b"[")
        if not bracket or between.strip() != (b"," if number else b""):
            raise _mixed()
        _refuse_too_many(ids, card)
        found.append(_decode(_ids, b"[" + ids + b"]", f"prompt[{number}]"))
    if end.strip():
        raise _mixed()
    return tuple(_known_lists(found, card))


def _refuse_too_many(ids: bytes, card: ModelCard) -> None:
    """Refuse before decoding a prompt that exceeds the model's context."""
    count = ids.count(b",") + 1
    if count > card.max_model_len:
        raise RequestError(
            f"This model's maximum context length is {card.max_model_len} tokens, but the prompt alone has "
            f"{count} tokens.",
            param="prompt",
            code=TOO_LONG,
        )


def _decode(decoder: msgspec.json.Decoder[Decoded], data: bytes, where: str) -> Decoded:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        param = where + path.rstrip("`")
        raise RequestError(f"{param}: {text}", param=param) from error


def _prompts(prompt: Shapes, config: GatewayConfig, card: ModelCard) -> tuple[str | list[int], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise RequestError("prompt is empty.", param="prompt")
    texts = [item for item in prompt if isinstance(item, str)]
    if len(texts) == len(prompt):
        return tuple(_few_enough(texts, config))
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return (card.known_tokens(ids, "prompt"),)
    lists = [item for item in prompt if isinstance(item, list)]
    if len(lists) == len(prompt):
        return tuple(_known_lists(_few_enough(lists, config), card))
    raise _mixed()


def _known_lists(lists: list[list[int]], card: ModelCard) -> list[list[int]]:
    if not all(lists):
        raise RequestError("prompt contains an empty list of token ids.", param="prompt")
    return [card.known_tokens(item, "prompt") for item in lists]


Item = TypeVar("Item")


def _few_enough(items: list[Item], config: GatewayConfig) -> list[Item]:
    if len(items) > config.own_waiting_requests:
        raise RequestError(
            f"{len(items)} prompts in one request; at most {config.own_waiting_requests} can wait.", param="prompt"
        )
    return items


def _mixed() -> RequestError:
    return RequestError("prompt mixes texts, token ids and lists of token ids.", param="prompt")
