"""POST /tokenize and /detokenize, as vLLM has them: a prompt or a chat to token ids, and ids to text.

Reading, limits and keys are those of requests that generate. Called by aiohttp through `middleware.py`; asks no worker.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from aiohttp import web

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError
from cohort.services.gateway.http.bodies import Message, Tool
from cohort.services.gateway.http.request_bodies import RequestBodies, refuse_shape
from cohort.services.gateway.requests.model_card import Served
from cohort.services.gateway.requests.parsing import check_model, decode, read_messages
from cohort.services.gateway.requests.tools import as_prompted, prompted
from cohort.services.gateway.text.tokenizer import INLINE_CHARACTERS

TOKENIZE_PATH, DETOKENIZE_PATH = "/tokenize", "/detokenize"
_encode = msgspec.json.Encoder().encode


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class Tokenized(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


class TokenApi:
    def __init__(self, config: GatewayConfig, served: Served, bodies: RequestBodies) -> None:
        self._config = config
        self._card = served.card
        self._tokenizer = served.tokenizer
        self._tool_format = served.tool_format
        self._bodies = bodies
        self._max_model_len = served.max_model_len

    def routes(self) -> list[web.RouteDef]:
        return [web.post(TOKENIZE_PATH, self.tokenize), web.post(DETOKENIZE_PATH, self.detokenize)]

    async def tokenize(self, request: web.Request) -> web.Response:
        async with self._bodies.reading(request) as data:
            refuse_shape(data, self._config, chat=True)
            body = decode(_tokenize_decoder, data)
            check_model(body.model, self._card)
            if (body.prompt is None) == (body.messages is None):
                raise RequestError("One of prompt and messages is wanted.", param="prompt")
            try:
                tokens = await (self._of_prompt(body) if body.prompt is not None else self._of_chat(body))
            except UnicodeEncodeError as error:
                raise RequestError("The text contains an unpaired surrogate, which is no character.") from error
        pieces = [self._tokenizer.piece(token) or "" for token in tokens] if body.return_token_strs else None
        return _json(Tokenized(len(tokens), self._max_model_len(), tokens, pieces))

    async def detokenize(self, request: web.Request) -> web.Response:
        async with self._bodies.reading(request) as data:
            refuse_shape(data, self._config, chat=False)
            body = decode(_detokenize_decoder, data)
        check_model(body.model, self._card)
        tokens = self._card.known_tokens(body.tokens, "tokens")
        if len(tokens) > self._most:
            raise RequestError(
                f"tokens has {len(tokens)} ids, but at most {self._most} are taken (gateway.max_request_work).",
                param="tokens",
            )
        if len(tokens) <= INLINE_CHARACTERS:
            return _json(Detokenized(self._tokenizer.decode(tokens, skip_special=False)))
        return _json(Detokenized(await asyncio.to_thread(self._tokenizer.decode, tokens, skip_special=False)))

    @property
    def _most(self) -> int:
        return self._config.max_request_work

    async def _of_prompt(self, body: TokenizeBody) -> list[int]:
        special = body.add_special_tokens is not False
        [tokens] = await self._tokenizer.encode_all([body.prompt or ""], special_tokens=special, limit=self._most)
        return tokens

    async def _of_chat(self, body: TokenizeBody) -> list[int]:
        messages = read_messages(body.messages or [])
        variables = dict(body.chat_template_kwargs or {})
        tools = [as_prompted(tool) for tool in body.tools or []]
        if self._tool_format is not None and self._tool_format.prompted:
            messages = prompted(messages, tools)
        elif tools:
            variables["tools"] = tools
        return await self._tokenizer.encode_chat(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=variables,
            limit=self._most,
        )


def _json(answer: Tokenized | Detokenized) -> web.Response:
    return web.Response(body=_encode(answer), content_type="application/json")
