"""`/docs`: the document of `/openapi.json` as a page, on which a request can be tried.

Plain HTML that is made at start and reads without scripts; `static/docs.js` sends the requests. Called by `openapi.py`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import msgspec

from cohort.services.gateway.front_page import CHAT_PATH, OPENAPI_PATH

REF = "#/components/schemas/"
_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
_FAR = 10**9
"""Limits from here on are no news, and left out."""
_HEAD = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>API · Cohort</title>
<link rel="icon" href="{CHAT_PATH}/logo.svg">
<link rel="stylesheet" href="{CHAT_PATH}/theme.css">
<link rel="stylesheet" href="{CHAT_PATH}/docs.css">
<script type="module" src="{CHAT_PATH}/docs.js"></script>
<header class="bar-top">
<h1 class="brand"><img src="{CHAT_PATH}/logo.svg" alt="" width="20" height="20">Cohort API</h1>"""
_KEY = '<input id="key" type="password" autocomplete="off" placeholder="API key" aria-label="API key">'


def docs_page(document: Mapping[str, Any]) -> str:
    schemas = document["components"]["schemas"]
    parts = [
        f'{_HEAD} <span class="dim">{html.escape(document["info"]["version"])}</span><span class="spacer"></span>',
        f'<a href="{CHAT_PATH}">Chat</a> <a href="{OPENAPI_PATH}">{OPENAPI_PATH}</a>',
        _KEY if "securitySchemes" in document["components"] else "",
        "</header><main>",
    ]
    for group, rows in groupby(_operations(document), key=lambda row: _group(row[1])):
        parts.append(f"<h2>{group}</h2>")
        parts += (_operation(*row, schemas) for row in rows)
    parts.append("<h2>Objects</h2>")
    for name, schema in schemas.items():
        parts.append(f'<section class="card" id="{name}"><h3><code>{name}</code></h3>')
        parts.append(f"{_about(schema)}{_fields(schema)}</section>")
    return "\n".join([*parts, "</main></html>"])


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def _group(path: str) -> str:
    version, _, rest = path[1:].partition("/")
    if version != "v1":
        return "Tokens" if version.endswith("tokenize") else "Service"
    return "LoRA adapters" if "lora" in rest else rest.partition("/")[0].capitalize()


def _operation(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    parts = [
        f'<details class="card" id="{operation["operationId"]}"><summary>'
        f'<b class="method {method}">{method.upper()}</b> '
        f"<code>{html.escape(path)}</code> <span>{_text(operation['summary'])}</span></summary>"
    ]
    [(media, body)] = operation.get("requestBody", {"content": {"": {}}})["content"].items()
    schema = body.get("schema", {})
    if "$ref" in schema:
        schema = schemas[schema["$ref"].removeprefix(REF)]
        parts.append(_about(schema).replace(f"{method.upper()} {html.escape(path)}. ", ""))
    parameters = operation.get("parameters", ())
    parts.append(f'<h4>Try it</h4><form data-method="{method}" data-path="{html.escape(path)}">')
    parts += (_input(each["name"], each["in"], each["schema"], each.get("required", False)) for each in parameters)
    if "example" in body:
        example = html.escape(msgspec.json.format(msgspec.json.encode(body["example"]), indent=2).decode())
        text = f'name="body" rows="{example.count(chr(10)) + 1}" spellcheck="false">{example}'
        parts.append(f'<label class="whole">body <textarea {text}</textarea></label>')
    elif schema:  # a form
        needed = schema.get("required", ())
        parts += (_input(name, "form", each, name in needed) for name, each in schema["properties"].items())
    parts.append('<button class="primary">Send</button> <output></output></form>')
    if parameters:
        rows = (_row(each["name"], f"{each['in']}, {_type(each['schema'])}") for each in parameters)
        parts.append(f"<h4>Parameters</h4>{_table(rows)}")
    if schema:
        parts.append(f"<h4>Body, <code>{media}</code></h4>{_fields(schema)}")
    answers = (_row(status, _answer(answer)) for status, answer in operation["responses"].items())
    parts.append(f"<h4>Answers</h4>{_table(answers)}</details>")
    return "".join(parts)


def _input(name: str, place: str, schema: Mapping[str, Any], needed: bool) -> str:
    attributes = f'name="{html.escape(name)}" data-in="{place}"{" required" if needed else ""}'
    if "enum" in schema:
        values = [
            *([] if needed else [""]),
            *(msgspec.json.encode(each).decode().strip('"') for each in schema["enum"]),
        ]
        field = f"<select {attributes}>{''.join(f'<option>{html.escape(each)}</option>' for each in values)}</select>"
    else:
        field = f"<input {attributes}{' type=file' if schema.get('format') == 'binary' else ''}>"
    return f"<label>{html.escape(name)} {field}</label>"


def _answer(answer: Mapping[str, Any]) -> str:
    """Return what an answer is, as HTML; errors have one shape and are referred to by status."""
    if "$ref" in answer:
        name = re.sub("[0-9]", "", answer["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    kinds = [f"{_type(content['schema'])} ({media})" for media, content in answer.get("content", {}).items()]
    return f"{_text(answer['description'])} {'; '.join(kinds)}"


def _about(schema: Mapping[str, Any]) -> str:
    return f"<p>{_text(schema['description'])}</p>" if "description" in schema else ""


def _fields(schema: Mapping[str, Any]) -> str:
    needed = schema.get("required", ())
    return _table(
        _row(name, f"{_type(kind)}{', <b>required</b>' if name in needed else ''}")
        for name, kind in schema.get("properties", {}).items()
    )


def _table(rows: Iterator[str]) -> str:
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'


def _row(name: str, value: str) -> str:
    return f"<tr><th scope=row><code>{html.escape(name)}</code><td>{value}"


def _text(plain: str) -> str:
    """Return a sentence as HTML, what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(plain))


def _type(schema: Mapping[str, Any]) -> str:
    """Return a schema's types in words, as HTML. That a field may be null as well as absent is not worth its words."""
    kinds = list(dict.fromkeys(_kinds(schema)))
    return " or ".join(each for each in kinds if each != "null" or len(kinds) == 1)


def _kinds(schema: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(REF)
        yield f'<a href="#{name}">{name}</a>'
    elif "anyOf" in schema:
        for each in schema["anyOf"]:
            yield from _kinds(each)
    elif "enum" in schema:
        yield html.escape(", ".join(msgspec.json.encode(value).decode() for value in schema["enum"]))
    elif schema.get("type") == "array":
        yield f"list of {_type(schema.get('items') or {})}"
    else:
        bounds = {sign: schema[key] for key, sign in _LIMITS.items() if key in schema}
        limited = [f"{sign} {bound:g}" for sign, bound in bounds.items() if abs(bound) < _FAR]
        yield html.escape(" ".join([str(schema.get("type", "any value")), *limited]))
