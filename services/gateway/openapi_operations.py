"""The operations of the API as `/openapi.json` lists them: parameters, body, answers and the errors that each can have.

Bodies and answers are structs; what no struct holds (forms, query and header parameters, statuses) is written here.
Read by `openapi.py`; tests/e2e/clients/test_schema.py checks it against a running pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

import msgspec

from cohort.services.gateway.apis.adapters_api import LOAD_PATH, UNLOAD_PATH, LoadAdapterBody, UnloadAdapterBody
from cohort.services.gateway.apis.embeddings_api import EMBEDDINGS_PATH, EmbeddingList, EmbeddingsBody
from cohort.services.gateway.apis.messages_api import COUNT_TOKENS_PATH, CountedTokens
from cohort.services.gateway.apis.messages_api_bodies import CountTokensBody, MessagesBody
from cohort.services.gateway.apis.messages_api_events import Event as MessagesEvent
from cohort.services.gateway.apis.messages_api_events import MessageAnswer
from cohort.services.gateway.apis.probes import Health, ModelList, ModelObject, Readiness, Version
from cohort.services.gateway.apis.responses_api import RESPONSES_PATH, DeletedResponse, InputItems
from cohort.services.gateway.apis.responses_api_bodies import ResponsesBody
from cohort.services.gateway.apis.responses_api_events import Event as ResponsesEvent
from cohort.services.gateway.apis.responses_api_events import ResponseObject
from cohort.services.gateway.apis.tenants import USAGE_PATH, UsageList
from cohort.services.gateway.apis.token_api import (
    DETOKENIZE_PATH,
    TOKENIZE_PATH,
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    Tokenized,
)
from cohort.services.gateway.batches.batch_objects import (
    LEAST_EXPIRY_S,
    LONGEST_EXPIRY_S,
    BatchBody,
    BatchObject,
    Deleted,
    FileObject,
    Page,
)
from cohort.services.gateway.front_page import CHAT_PATH, DOCS_PATH, OPENAPI_PATH, Front
from cohort.services.gateway.generation.openai_shapes import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    PromptPlace,
)
from cohort.services.gateway.http.bodies import LEAST_MS, MOST_MS, ChatBody, CompletionBody
from cohort.services.gateway.http.error_shapes import MESSAGES_PATH
from cohort.services.gateway.http.service_headers import (
    CLASS_HEADER,
    IF_LATE_HEADER,
    LAST_EVENT_HEADER,
    RESUME_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
)
from cohort.services.gateway.resume.resumption import STREAMS_PATH

JSON, TEXT, EVENTS, LINES, HTML = (
    "application/json",
    "text/plain",
    "text/event-stream",
    "application/jsonl",
    "text/html",
)
FORM = "multipart/form-data"
Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Operation:
    """`answer`: of `success`; None with `media` "" = no body. `events`: what a stream of events carries, where
    the body asks for one. `links`: operations that take the `id` of the answer."""

    id: str
    method: str
    path: str
    summary: str
    body: type | None = None
    form: Schema | None = None
    answer: type | None = None
    media: str = JSON
    success: int = 200
    events: tuple[Any, ...] = ()
    errors: tuple[int, ...] = ()
    redirects: bool = False
    parameters: tuple[Schema, ...] = ()
    links: tuple[str, ...] = ()
    example: Mapping[str, Any] = field(default_factory=dict)
    """A body that can be answered, less the model's name."""


# Every operation: a request that is none (400), one of a page of another site (403), a defect (500).
EVERYWHERE = (400, 403, 500)
# A body that comes too slowly, is too long, of another type, or one of too many.
_READ = (408, 413, 415, 429)
# No such model, too many requests or the limit of a key, no worker, too late.
_GENERATE = (*_READ, 404, 503, 504)
_ITEM = (404, 503)
_STORED = (503, 507)

_KIND_AND_SLO: tuple[Schema, ...] = (
    {"name": CLASS_HEADER, "in": "header", "schema": {"enum": ["rt", "be"]}},
    *(
        {"name": name, "in": "header", "schema": {"type": "number", "minimum": LEAST_MS, "maximum": MOST_MS}}
        for name in (TTFT_HEADER, TPOT_HEADER)
    ),
    {"name": IF_LATE_HEADER, "in": "header", "schema": {"enum": ["refuse", "best_effort", "serve"]}},
)
_RESUME: Schema = {"name": RESUME_HEADER, "in": "header", "schema": {"enum": ["keep"]}}
_LAST_EVENT: Schema = {"name": LAST_EVENT_HEADER, "in": "header", "schema": {"type": "string"}}
_ORDER: Schema = {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}}
_AFTER: Schema = {"name": "after", "in": "query", "schema": {"type": "string"}}
_FILE_FORM: Schema = {
    "type": "object",
    "properties": {
        "purpose": {"enum": ["batch"]},
        "file": {"type": "string", "format": "binary"},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": LEAST_EXPIRY_S, "maximum": LONGEST_EXPIRY_S},
    },
    "required": ["purpose", "file"],
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
    "additionalProperties": False,
}


def _limit(most: int) -> Schema:
    return {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": most}}


def _flag(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "schema": schema}


def _with(struct: type, name: str, **types: Any) -> type:
    """Return `struct` with other types for fields that are encoded as JSON before they are stored in it."""
    hints = get_type_hints(struct) | types
    fields = [(each.encode_name, hints[each.name], each.default) for each in msgspec.structs.fields(struct)]
    return msgspec.defstruct(name, [each[:2] if each[2] is msgspec.NODEFAULT else each for each in fields])


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None


_PromptPlaces = list[dict[str, PromptPlace] | None]
_completion_choice = _with(
    CompletionChoice,
    "CompletionChoice",
    logprobs=CompletionLogprobs | None,
    prompt_logprobs=_PromptPlaces | msgspec.UnsetType,
)
_chat_choice = _with(ChatChoice, "ChatChoice", logprobs=ChatLogprobs | None)
_prompt_places_of_chat = _PromptPlaces | msgspec.UnsetType
_completion = _with(Answer, "Completion", choices=list[_completion_choice])  # type: ignore[valid-type]
_chat = _with(
    Answer,
    "ChatCompletion",
    choices=list[_chat_choice],  # type: ignore[valid-type]
    prompt_logprobs=_prompt_places_of_chat,
)
_chat_chunk_choice = _with(ChatChunkChoice, "ChatChunkChoice", logprobs=ChatLogprobs | None)
_chat_chunk = _with(Answer, "ChatCompletionChunk", choices=list[_chat_chunk_choice])  # type: ignore[valid-type]
_file_list = _with(Page, "FileList", data=list[FileObject])
_batch_list = _with(Page, "BatchList", data=list[BatchObject])

_QUESTION = {"messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
_one = RESPONSES_PATH + "/{id}"

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "createCompletion",
        "post",
        "/v1/completions",
        "Continue a prompt; a stream of the same with `stream`.",
        body=CompletionBody,
        answer=_completion,
        events=(_completion,),
        errors=_GENERATE,
        parameters=(*_KIND_AND_SLO, _RESUME),
        example={"prompt": "The sea is", "max_tokens": 8},
    ),
    Operation(
        "createChatCompletion",
        "post",
        "/v1/chat/completions",
        "Answer a chat; a stream of the same with `stream`.",
        body=ChatBody,
        answer=_chat,
        events=(_chat_chunk,),
        errors=_GENERATE,
        parameters=(*_KIND_AND_SLO, _RESUME),
        example={**_QUESTION, "max_completion_tokens": 8},
    ),
    Operation(
        "createEmbedding",
        "post",
        EMBEDDINGS_PATH,
        "Embed one or more inputs.",
        body=EmbeddingsBody,
        answer=EmbeddingList,
        errors=_GENERATE,
        parameters=_KIND_AND_SLO,
        example={"input": ["The sea is blue.", "Bread is baked."]},
    ),
    Operation(
        "resumeStream",
        "get",
        STREAMS_PATH,
        "Resume a stream after the event that `Last-Event-ID` names.",
        media=EVENTS,
        events=(_completion, _chat_chunk, *get_args(ResponsesEvent), MessagesEvent),
        errors=(404, 409, 410, 429, 503, 504),
        parameters=(_LAST_EVENT,),
    ),
    Operation(
        "cancelStream", "delete", STREAMS_PATH, "End a stream that can be resumed.", media="", success=204, errors=_ITEM
    ),
    Operation(
        "createResponse",
        "post",
        RESPONSES_PATH,
        "Answer a text or items, and continue a kept response; a stream of events with `stream`.",
        body=ResponsesBody,
        answer=ResponseObject,
        events=get_args(ResponsesEvent),
        errors=_GENERATE,
        parameters=(*_KIND_AND_SLO, _RESUME),
        links=("getResponse", "deleteResponse", "listInputItems", "cancelResponse"),
        example={"input": "What is the capital of Japan?", "max_output_tokens": 8},
    ),
    Operation(
        "getResponse",
        "get",
        _one,
        "A response that is kept, or made in the background; a stream of its events with `stream`.",
        answer=ResponseObject,
        events=get_args(ResponsesEvent),
        errors=(*_ITEM, 410, 429),
        parameters=(
            _flag("stream", {"enum": [False, True]}),
            _flag("starting_after", {"type": "integer", "minimum": 0}),
        ),
    ),
    Operation("deleteResponse", "delete", _one, "Delete a kept response.", answer=DeletedResponse, errors=_ITEM),
    Operation(
        "listInputItems",
        "get",
        f"{_one}/input_items",
        "The input items of a kept response.",
        answer=InputItems,
        errors=_ITEM,
        parameters=(_limit(100), _ORDER, _AFTER),
    ),
    Operation(
        "cancelResponse",
        "post",
        f"{_one}/cancel",
        "End a response in the background.",
        answer=ResponseObject,
        errors=_ITEM,
    ),
    Operation(
        "createMessage",
        "post",
        MESSAGES_PATH,
        "Answer messages as Anthropic's API does; a stream of events with `stream`.",
        body=MessagesBody,
        answer=MessageAnswer,
        events=(MessagesEvent,),
        errors=_GENERATE,
        parameters=(*_KIND_AND_SLO, _RESUME),
        example={**_QUESTION, "max_tokens": 8},
    ),
    Operation(
        "countTokens",
        "post",
        COUNT_TOKENS_PATH,
        "The tokens of a prompt of messages.",
        body=CountTokensBody,
        answer=CountedTokens,
        errors=_GENERATE,
        example=_QUESTION,
    ),
    Operation(
        "loadLoraAdapter",
        "post",
        LOAD_PATH,
        "Add a LoRA adapter; for an operator's key.",
        body=LoadAdapterBody,
        media=TEXT,
        errors=_READ,
    ),
    Operation(
        "unloadLoraAdapter",
        "post",
        UNLOAD_PATH,
        "Remove an added LoRA adapter; for an operator's key.",
        body=UnloadAdapterBody,
        media=TEXT,
        errors=(404, *_READ),
    ),
    Operation("listModels", "get", "/v1/models", "The model that is served, and its LoRA adapters.", answer=ModelList),
    Operation(
        "getModel", "get", "/v1/models/{name}", "One model or adapter by its name.", answer=ModelObject, errors=(404,)
    ),
    Operation(
        "tokenize",
        "post",
        TOKENIZE_PATH,
        "A prompt or a chat as token ids.",
        body=TokenizeBody,
        answer=Tokenized,
        errors=(*_READ, 404, 503),
        example={"prompt": "The sea is"},
    ),
    Operation(
        "detokenize",
        "post",
        DETOKENIZE_PATH,
        "Token ids as text.",
        body=DetokenizeBody,
        answer=Detokenized,
        errors=(*_READ, 404),
        example={"tokens": [5, 6, 7]},
    ),
    Operation(
        "createFile",
        "post",
        "/v1/files",
        "Upload a file of requests.",
        form=_FILE_FORM,
        answer=FileObject,
        errors=(408, 413, 415, 429, *_STORED),
        links=("getFile", "getFileContent", "deleteFile"),
    ),
    Operation(
        "listFiles",
        "get",
        "/v1/files",
        "The files of this key.",
        answer=_file_list,
        errors=_STORED,
        parameters=(_flag("purpose", {"type": "string"}), _limit(10_000), _ORDER, _AFTER),
    ),
    Operation("getFile", "get", "/v1/files/{id}", "A file.", answer=FileObject, errors=(404, *_STORED)),
    Operation(
        "getFileContent",
        "get",
        "/v1/files/{id}/content",
        "Its content; a part of it with `Range` (206).",
        media=LINES,
        errors=(404, 416, *_STORED),
    ),
    Operation(
        "deleteFile",
        "delete",
        "/v1/files/{id}",
        "Delete a file; 409 while a batch reads it.",
        answer=Deleted,
        errors=(404, 409, *_STORED),
    ),
    Operation(
        "createBatch",
        "post",
        "/v1/batches",
        "Work off a file of requests.",
        body=BatchBody,
        answer=BatchObject,
        errors=(408, 413, 415, 429, *_STORED),
        links=("getBatch", "cancelBatch"),
        example={"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h"},
    ),
    Operation(
        "listBatches",
        "get",
        "/v1/batches",
        "The batches of this key.",
        answer=_batch_list,
        errors=_STORED,
        parameters=(_limit(100), _AFTER),
    ),
    Operation("getBatch", "get", "/v1/batches/{id}", "A batch.", answer=BatchObject, errors=(404, *_STORED)),
    Operation(
        "cancelBatch",
        "post",
        "/v1/batches/{id}/cancel",
        "End a batch; 409 for one that has ended.",
        answer=BatchObject,
        errors=(404, 409, *_STORED),
    ),
    Operation(
        "getUsage",
        "get",
        USAGE_PATH,
        "What this key used, by day and class; 404 where no keys are asked for.",
        answer=UsageList,
        errors=_ITEM,
        parameters=(_flag("days", {"type": "integer", "minimum": 0}), _flag("keys", {"enum": ["own", "all"]})),
    ),
    Operation("health", "get", "/health", "Whether the process lives.", answer=Health),
    Operation(
        "ready", "get", "/ready", "Whether a request could be served now; 503 with the reason.", answer=Readiness
    ),
    Operation("version", "get", "/version", "Version, preset and model.", answer=Version),
    Operation("metrics", "get", "/metrics", "Prometheus text.", media=TEXT),
    Operation("front", "get", "/", "What this is and where everything lies.", answer=Front, redirects=True),
    Operation("openapi", "get", OPENAPI_PATH, "This document.", answer=dict),
    Operation("docs", "get", DOCS_PATH, "The same for readers.", media=HTML),
    Operation("chat", "get", CHAT_PATH, "A page to try the model.", media=HTML),
)
