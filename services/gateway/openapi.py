"""`/openapi.json`, and `/docs` to read it: what the API takes and gives, from the structs that parse and answer.

A field is documented because it is parsed: nothing here names one. Both are made once, at start; the page is plain HTML
without scripts or anything from elsewhere. Called by aiohttp.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

import msgspec
from aiohttp import web

import cohort
from cohort.services.gateway.bodies import ChatBody, CompletionBody
from cohort.services.gateway.error_shapes import MESSAGES_PATH, AnthropicError
from cohort.services.gateway.front_page import DOCS_PATH, OPENAPI_PATH
from cohort.services.gateway.messages_api import COUNT_TOKENS_PATH, CountedTokens
from cohort.services.gateway.messages_api_bodies import CountTokensBody, MessagesBody
from cohort.services.gateway.messages_api_events import MessageAnswer
from cohort.services.gateway.openai_shapes import Answer, ChatChoice, CompletionChoice
from cohort.services.gateway.responses_api import RESPONSES_PATH, DeletedResponse, InputItems
from cohort.services.gateway.responses_api_bodies import ResponsesBody
from cohort.services.gateway.responses_api_events import ResponseObject
from cohort.services.gateway.token_api import (
    DETOKENIZE_PATH,
    TOKENIZE_PATH,
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    Tokenized,
)


def _answer(name: str, choice: type) -> type:
    """`Answer` with the choices of one endpoint."""
    hints = get_type_hints(Answer)
    hints["choices"] = list[choice]  # type: ignore[valid-type]
    fields = [(field.name, hints[field.name], field.default) for field in msgspec.structs.fields(Answer)]
    return msgspec.defstruct(name, [f[:2] if f[2] is msgspec.NODEFAULT else f for f in fields])


_Operation = tuple[str, str, str, type | None, type | None]
"""Method, path, one line, body and answer."""
_OPERATIONS: tuple[_Operation, ...] = (
    (
        "post",
        "/v1/completions",
        "Continue a prompt; a stream of the same with `stream`.",
        CompletionBody,
        _answer("Completion", CompletionChoice),
    ),
    (
        "post",
        "/v1/chat/completions",
        "Answer a chat; a stream of the same with `stream`.",
        ChatBody,
        _answer("ChatCompletion", ChatChoice),
    ),
    ("get", "/v1/streams/{id}", "The rest of a stream behind `Last-Event-ID`.", None, None),
    ("delete", "/v1/streams/{id}", "End a stream that can be resumed.", None, None),
    (
        "post",
        RESPONSES_PATH,
        "Answer items or a text, and go on with what was answered; a stream of events with `stream`.",
        ResponsesBody,
        ResponseObject,
    ),
    ("get", RESPONSES_PATH + "/{id}", "A response that is kept.", None, ResponseObject),
    ("delete", RESPONSES_PATH + "/{id}", "Delete it.", None, DeletedResponse),
    ("get", RESPONSES_PATH + "/{id}/input_items", "What it was made from.", None, InputItems),
    ("post", RESPONSES_PATH + "/{id}/cancel", "Refused: a response that is kept has ended.", None, None),
    (
        "post",
        MESSAGES_PATH,
        "Answer messages as Anthropic's API does; a stream of events with `stream`.",
        MessagesBody,
        MessageAnswer,
    ),
    ("post", COUNT_TOKENS_PATH, "The tokens of a prompt of messages.", CountTokensBody, CountedTokens),
    ("get", "/v1/models", "The model that is served.", None, None),
    ("post", TOKENIZE_PATH, "A prompt or a chat as token ids.", TokenizeBody, Tokenized),
    ("post", DETOKENIZE_PATH, "Token ids as text.", DetokenizeBody, Detokenized),
    ("post", "/v1/files", "Upload a file of requests.", None, None),
    ("get", "/v1/files", "The files of this key.", None, None),
    ("get", "/v1/files/{id}", "A file.", None, None),
    ("get", "/v1/files/{id}/content", "Its content.", None, None),
    ("delete", "/v1/files/{id}", "Delete a file.", None, None),
    ("post", "/v1/batches", "Work off a file of requests.", None, None),
    ("get", "/v1/batches", "The batches of this key.", None, None),
    ("get", "/v1/batches/{id}", "A batch.", None, None),
    ("post", "/v1/batches/{id}/cancel", "End a batch.", None, None),
    ("get", "/v1/usage", "What this key used, by day and class.", None, None),
    ("get", "/health", "Whether the process lives.", None, None),
    ("get", "/ready", "Whether a request could be served now.", None, None),
    ("get", "/version", "Version, preset and model.", None, None),
    ("get", "/metrics", "Prometheus text.", None, None),
)
_REF = "#/components/schemas/"
_KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""Either will do."""
_ERROR = {
    "description": "What is wrong, in OpenAI's shape.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {
                    "error": {
                        "type": "object",
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": "integer"},
                        },
                    }
                },
            }
        }
    },
}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
@media (prefers-color-scheme: dark) { body { background: #14181d; color: #dde3ea } a { color: #8ab8ff } }
code, td:first-child { font-family: ui-monospace, monospace; font-size: .9em }
table { border-collapse: collapse; width: 100% }
td { border-top: 1px solid #8884; padding: .25rem .5rem; vertical-align: top }
summary { cursor: pointer; padding: .4rem 0 }
"""


class ApiPages:
    def __init__(self, *, keys: bool) -> None:
        """`keys`: whether a bearer token is asked for."""
        document = openapi(keys=keys)
        self._document = msgspec.json.encode(document)
        self._page = docs_page(document)

    def routes(self) -> list[web.RouteDef]:
        return [web.get(OPENAPI_PATH, self.openapi), web.get(DOCS_PATH, self.docs)]

    async def openapi(self, _: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type="application/json")

    async def docs(self, _: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
        return web.Response(text=self._page, content_type="text/html", headers=headers)


def openapi(*, keys: bool) -> dict[str, Any]:
    documented = (each for row in _OPERATIONS for each in row[3:] if each is not None)
    structs = list(dict.fromkeys((*documented, AnthropicError)))
    schemas, components = msgspec.json.schema_components(structs, ref_template=f"{_REF}{{name}}")
    schema_of = dict(zip(structs, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, body, answer in _OPERATIONS:
        operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "The answer."}}}
        operation["responses"]["default"] = (
            {"description": "What is wrong, in Anthropic's shape.", "content": _json_content(schema_of[AnthropicError])}
            if path.startswith(MESSAGES_PATH)
            else _ERROR
        )
        if body is not None:
            operation["requestBody"] = {"required": True, "content": _json_content(schema_of[body])}
        if answer is not None:
            operation["responses"]["200"]["content"] = _json_content(schema_of[answer])
        if "{id}" in path:
            operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        if keys and (path.startswith("/v1") or body in (TokenizeBody, DetokenizeBody)):
            operation["security"] = [{name: []} for name in _KEYS]
        paths.setdefault(path, {})[method] = operation
    security = {"securitySchemes": _KEYS} if keys else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Cohort", "version": cohort.__version__},
        "paths": paths,
        "components": {"schemas": components, **security},
    }


def _json_content(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def docs_page(document: Mapping[str, Any]) -> str:
    info, components = document["info"], document["components"]["schemas"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{info['title']} API</title><style>{_STYLE}</style>",
        f"<h1>{info['title']} {html.escape(info['version'])}</h1>",
        f'<p>The same for programs: <a href="{OPENAPI_PATH}">{OPENAPI_PATH}</a>.</p>',
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            title = f"<code>{method.upper()} {html.escape(path)}</code> {html.escape(operation['summary'])}"
            if "requestBody" not in operation:
                parts.append(f"<p>{title}</p>")
                continue
            reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            body = reference.removeprefix(_REF)
            parts.append(f'<details><summary>{title}</summary><p>Body: <a href="#{body}">{body}</a></p></details>')
    parts.append("<h2>Objects</h2>")
    for name, schema in components.items():
        about = html.escape(schema.get("description", ""))
        parts.append(f'<h3 id="{name}">{name}</h3><p>{about}</p><table>')
        for field, kind in schema.get("properties", {}).items():
            needed = ", required" if field in schema.get("required", ()) else ""
            parts.append(f"<tr><td>{html.escape(field)}<td>{' or '.join(_kinds(kind))}{needed}")
        parts.append("</table>")
    return "\n".join(parts)


def _kinds(schema: Mapping[str, Any]) -> Iterator[str]:
    """In words, as HTML."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        yield f'<a href="#{name}">{name}</a>'
    elif "anyOf" in schema:
        for each in schema["anyOf"]:
            yield from _kinds(each)
    elif "enum" in schema:
        yield html.escape(", ".join(msgspec.json.encode(value).decode() for value in schema["enum"]))
    elif schema.get("type") == "array":
        yield f"list of ({' or '.join(_kinds(schema.get('items') or {}))})"
    else:
        limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "maxLength": "length ≤"}
        told = [f"{sign} {schema[key]:g}" for key, sign in limits.items() if key in schema]
        yield html.escape(" ".join([str(schema.get("type", "any value")), *told]))
