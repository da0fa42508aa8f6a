"""POST /tokenize and /detokenize, as vLLM has them: a prompt or a chat to token ids, and ids to text.

Reading, limits and keys are those of requests that generate. Texts are tokenised and answers built within the budget of
`text_budget.py`. Called by aiohttp through `middleware.py`; asks no worker.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from aiohttp import web

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError
from cohort.services.gateway.http.bodies import Message, Tool
from cohort.services.gateway.http.request_bodies import RequestBodies, refuse_shape
from cohort.services.gateway.keys.middleware import OWNER
from cohort.services.gateway.keys.owners import Owners
from cohort.services.gateway.requests.model_card import Served
from cohort.services.gateway.requests.parsing import check_model, decode, read_messages
from cohort.services.gateway.requests.tools import as_prompted, for_template, with_tools
from cohort.services.gateway.text.tokenizer import PromptTooLong, Tokenizer, byte_length

TOKENIZE_PATH, DETOKENIZE_PATH = "/tokenize", "/detokenize"
CONTEXTS = 4
"""Contexts of the model that one request may tokenise: enough to see how much too long a text is."""
SLICE_TOKENS = 8192
"""Tokens that become JSON at a time: a millisecond in which no other thread runs."""
_ID_BYTES = 8  # of a token that becomes text
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
    def __init__(self, config: GatewayConfig, served: Served, bodies: RequestBodies, owners: Owners) -> None:
        self._config = config
        self._owners = owners
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
            body = decode(_tokenize_decoder, data, self._config)
            check_model(body.model, self._card)
            if (body.prompt is None) == (body.messages is None):
                raise RequestError("One of prompt and messages is wanted.", param="prompt")
            try:
                # In one piece of work: an answer must not wait behind, or be refused for, what came after its text.
                owner = self._owner(request)
                text = await self._text(body, owner)
                work = partial(self._tokenized, body, text)
                return _json(await self._tokenizer.within_budget(byte_length(text), work, owner))
            except UnicodeEncodeError as error:
                raise RequestError("The text contains an unpaired surrogate, which is no character.") from error
            except PromptTooLong as error:
                raise self._too_many(str(error.param), f"at least {error.least}") from error

    async def detokenize(self, request: web.Request) -> web.Response:
        async with self._bodies.reading(request) as data:
            refuse_shape(data, self._config, chat=False)
            body = decode(_detokenize_decoder, data, self._config)
        check_model(body.model, self._card)
        if len(body.tokens) > self._most:
            raise self._too_many("tokens", str(len(body.tokens)))
        tokens = self._card.known_tokens(body.tokens, "tokens")

        def work() -> bytes:
            return _encode(Detokenized(self._tokenizer.decode(tokens, skip_special=False)))

        return _json(await self._tokenizer.within_budget(len(tokens) * _ID_BYTES, work, self._owner(request)))

    def _owner(self, request: web.Request) -> str:
        return self._owners.queue_owner(request[OWNER])

    @property
    def _most(self) -> int:
        return min(self._config.max_request_work, CONTEXTS * self._max_model_len())

    def _too_many(self, param: str, count: str) -> RequestError:
        return RequestError(
            f"{param} has {count} tokens, but at most {self._most} are taken: {CONTEXTS} contexts of the model, within "
            "gateway.max_request_work.",
            param=param,
        )

    def _tokenized(self, body: TokenizeBody, text: str) -> bytes:
        special = body.prompt is not None and body.add_special_tokens is not False  # a template writes its own
        tokens = self._tokenizer.encode(text, special_tokens=special)
        if len(tokens) > self._most:
            raise self._too_many("messages" if body.prompt is None else "prompt", str(len(tokens)))
        return tokenized_json(self._tokenizer, tokens, self._max_model_len(), strings=bool(body.return_token_strs))

    async def _text(self, body: TokenizeBody, owner: str) -> str:
        if body.prompt is not None:
            self._tokenizer.refuse_too_long(body.prompt, self._most, "prompt")
            return body.prompt
        messages = read_messages(body.messages or [])
        variables = dict(body.chat_template_kwargs or {})
        tools = [as_prompted(tool) for tool in body.tools or []]
        messages, of_tools = with_tools(for_template(messages, self._tool_format), tools, self._tool_format)
        variables |= of_tools
        return await self._tokenizer.render_soon(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=variables,
            limit=self._most,
            owner=owner,
        )


def tokenized_json(tokenizer: Tokenizer, tokens: list[int], max_model_len: int, *, strings: bool) -> bytes:
    """Encode a `Tokenized`, a slice at a time."""
    slices = [tokens[start : start + SLICE_TOKENS] for start in range(0, len(tokens), SLICE_TOKENS)]
    ids = b",".join(_encode(each)[1:-1] for each in slices)
    pieces = b"null"
    if strings:
        pieces = b"[%b]" % b",".join(_encode([tokenizer.piece(token) or "" for token in each])[1:-1] for each in slices)
    return b'{"count":%d,"max_model_len":%d,"tokens":[%b],"token_strs":%b}' % (len(tokens), max_model_len, ids, pieces)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
