"""`/openapi.json`, and `/docs` to read it: what the API takes and gives, from the structs that parse and answer.

A field is documented because it is parsed. `openapi_operations.py` lists operations and their errors. Both are made at
start; the page is plain HTML without scripts. Called by aiohttp.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from aiohttp import web

import cohort
from cohort.services.gateway.apis.token_api import DETOKENIZE_PATH, TOKENIZE_PATH
from cohort.services.gateway.front_page import DOCS_PATH, OPENAPI_PATH
from cohort.services.gateway.http.error_shapes import MESSAGES_PATH, AnthropicError, OpenAiError
from cohort.services.gateway.openapi_operations import EVENTS, EVERYWHERE, FORM, JSON, OPERATIONS, Operation

_REF = "#/components/schemas/"
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
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
@media (prefers-color-scheme: dark) { body { background: #14181d; color: #dde3ea } a { color: #8ab8ff } }
code, td:first-child { font-family: ui-monospace, monospace; font-size: .9em }
table { border-collapse: collapse; width: 100% }
td { border-top: 1px solid #8884; padding: .25rem .5rem; vertical-align: top }
summary { cursor: pointer; padding: .4rem 0 }
"""


class ApiPages:
    def __init__(self, *, keys: bool, model: str) -> None:
        """`keys`: whether a bearer token is required. `model`: its served name, for the examples."""
        document = openapi(keys=keys, model=model)
        self._document = msgspec.json.encode(document)
        self._page = docs_page(document)

    def routes(self) -> list[web.RouteDef]:
        return [web.get(OPENAPI_PATH, self.openapi), web.get(DOCS_PATH, self.docs)]

    async def openapi(self, _: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type="application/json")

    async def docs(self, _: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
        return web.Response(text=self._page, content_type="text/html", headers=headers)


def openapi(*, keys: bool, model: str) -> dict[str, Any]:
    documented = (each for row in OPERATIONS for each in (row.body, row.answer, *row.events))
    structs = list(dict.fromkeys((*(each for each in documented if each is not None), OpenAiError, AnthropicError)))
    schemas, components = msgspec.json.schema_components(structs, ref_template=f"{_REF}{{name}}")
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
            schema = operation["requestBody"]["content"].get(JSON, {}).get("schema")
            if schema is None:
                parts.append(f"<p>{title}: a form.</p>")
                continue
            body = schema["$ref"].removeprefix(_REF)
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
    """Yield the schema's types in words, as HTML."""
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
        limited = [f"{sign} {schema[key]:g}" for key, sign in limits.items() if key in schema]
        yield html.escape(" ".join([str(schema.get("type", "any value")), *limited]))
