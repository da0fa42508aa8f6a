"""`/openapi.json`, and `/docs` to read it: what the API takes and gives, from the structs that parse and answer.

A field is documented because it is parsed. `openapi_operations.py` lists operations and their errors. Called by
aiohttp.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from aiohttp import web

import cohort
from cohort.common.http.static_pages import Handler, serves
from cohort.services.gateway.api_page import REF, docs_page
from cohort.services.gateway.apis.token_api import DETOKENIZE_PATH, TOKENIZE_PATH
from cohort.services.gateway.front_page import DOCS_PATH, OPENAPI_PATH
from cohort.services.gateway.http.error_shapes import MESSAGES_PATH, AnthropicError, OpenAiError
from cohort.services.gateway.openapi_operations import EVENTS, EVERYWHERE, FORM, JSON, OPERATIONS, Operation

_KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""Security schemes; either will do."""
_ID_HEADER = {"x-request-id": {"required": True, "schema": {"type": "string"}}}
_DESCRIPTIONS = {
    200: "The answer.",
    204: "Done.",
    206: "The part that `Range` names.",
    302: "A browser is led to a page.",
    400: "The request says something wrong; `param` names the field.",
    401: "No API key, or one that is not known.",
    403: "A page of another site in a browser, or what this key may not do.",
    404: "There is no such thing, for this key.",
    408: "The body came too slowly.",
    409: "Not in its present state.",
    410: "It is over.",
    413: "The body is too long.",
    415: "The body is of a type that is not read here.",
    416: "The range lies beyond the end.",
    429: "Too much at once, or beyond a limit of this key; `Retry-After` says when to come again.",
    500: "A defect of the server.",
    503: "No worker, or no database, now.",
    504: "The request took too long.",
    507: "The storage is full.",
}


class ApiPages:
    """Two pages, made at the first request for one: a gateway that takes over is ready 0.2 s sooner."""

    def __init__(self, *, keys: bool, model: str) -> None:
        """`keys`: whether a bearer token is required. `model`: its served name, for the examples."""
        self._made = functools.cache(lambda: _pages(keys=keys, model=model))

    def routes(self) -> list[web.RouteDef]:
        return [web.get(OPENAPI_PATH, self.openapi), web.get(DOCS_PATH, self._docs)]

    async def openapi(self, _: web.Request) -> web.Response:
        document, _page = await asyncio.to_thread(self._made)
        return web.Response(body=document, content_type="application/json")

    async def _docs(self, request: web.Request) -> web.StreamResponse:
        _document, page = await asyncio.to_thread(self._made)
        return await page(request)


def _pages(*, keys: bool, model: str) -> tuple[bytes, Handler]:
    document = openapi(keys=keys, model=model)
    return msgspec.json.encode(document), serves(docs_page(document).encode(), "text/html")


def openapi(*, keys: bool, model: str) -> dict[str, Any]:
    documented = (each for row in OPERATIONS for each in (row.body, row.answer, *row.events))
    structs = list(dict.fromkeys((*(each for each in documented if each is not None), OpenAiError, AnthropicError)))
    schemas, components = msgspec.json.schema_components(structs, ref_template=f"{REF}{{name}}")
    schema_of = dict(zip(structs, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        with_key = keys and (operation.path.startswith("/v1") or operation.path in (TOKENIZE_PATH, DETOKENIZE_PATH))
        described: dict[str, Any] = {
            "operationId": operation.id,
            "summary": operation.summary,
            "responses": _responses(operation, schema_of, with_key=with_key),
        }
        if content := _taken(operation, schema_of, model):
            described["requestBody"] = {"required": True, "content": content}
        if parameters := [*_path_parameters(operation.path), *operation.parameters]:
            described["parameters"] = parameters
        if with_key:
            described["security"] = [{name: []} for name in _KEYS]
        paths.setdefault(operation.path, {})[operation.method] = described
    security = {"securitySchemes": _KEYS} if keys else {}
    errors = {
        f"{kind.__name__}{status}": _response(status, {"content": {JSON: {"schema": schema_of[kind]}}})
        for kind in (OpenAiError, AnthropicError)
        for status in _DESCRIPTIONS
        if status >= 400
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Cohort", "version": cohort.__version__},
        "paths": paths,
        "components": {"schemas": components, "responses": errors, **security},
    }


def _responses(operation: Operation, schema_of: Mapping[Any, Any], *, with_key: bool) -> dict[str, Any]:
    kind = AnthropicError if operation.path.startswith(MESSAGES_PATH) else OpenAiError
    error = schema_of[kind]
    answers: dict[int, dict[str, Any]] = {}
    if operation.success:
        content = {}
        if operation.media:
            schema = {"type": "string"} if operation.answer is None else schema_of[operation.answer]
            content[operation.media] = {"schema": schema}
        if operation.events:
            content[EVENTS] = {"schema": _event_schema([schema_of[each] for each in operation.events], error)}
        answers[operation.success] = {"content": content} if content else {}
        if operation.links:
            given = {"parameters": {"id": "$response.body#/id"}}
            answers[operation.success]["links"] = {name: {"operationId": name, **given} for name in operation.links}
    if operation.redirects:
        answers[302] = {}
    if 416 in operation.errors:
        answers[206] = answers[operation.success]
    wrong = {*EVERYWHERE, *operation.errors, *((401, 429) if with_key else ())}
    if operation.id == "ready":
        answers[503] = answers[operation.success]
        wrong.discard(503)
    described = {status: {"$ref": f"#/components/responses/{kind.__name__}{status}"} for status in wrong}
    described |= {status: _response(status, answer) for status, answer in answers.items()}
    return {str(status): described[status] for status in sorted(described)}


def _event_schema(data: list[Any], error: Any) -> dict[str, Any]:
    """Return the schema of a stream's event. Its data is JSON, but for the last of OpenAI's chunks."""
    text = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": [*data, error]}}
    return {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, text]}}, "required": ["data"]}


def _response(status: int, answer: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": _DESCRIPTIONS[status], "headers": _ID_HEADER, **answer}


def _taken(operation: Operation, schema_of: Mapping[Any, Any], model: str) -> dict[str, Any]:
    if operation.form is not None:
        return {FORM: {"schema": operation.form}}
    if operation.body is None:
        return {}
    content: dict[str, Any] = {"schema": schema_of[operation.body]}
    if operation.example:
        named = any(each.encode_name == "model" for each in msgspec.structs.fields(operation.body))
        content["example"] = {**({"model": model} if named else {}), **operation.example}
    return {JSON: content}


def _path_parameters(path: str) -> Iterator[dict[str, Any]]:
    for part in path.split("/"):
        if part.startswith("{"):
            schema = {"type": "string", "minLength": 1}
            yield {"name": part[1:-1], "in": "path", "required": True, "schema": schema}
