"""What an answer is bound to, as clients of OpenAI and vLLM name it, to one `Wanted`.

    response_format                                        json_object, json_schema
    structured_outputs: json, json_object, regex, choice, grammar        ┐ as vLLM names them,
    guided_json, guided_regex, guided_choice, guided_grammar             ┘ today and before

Pure; called by `parsing.py`. One of them at a time; what else they may ask for is refused by name. Whether the grammar
itself is right is `grammar_process.py`'s business.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cohort.common.errors import RequestError
from cohort.services.gateway.http.bodies import GeneratingBody, ResponseFormat, StructuredOutputs
from cohort.services.gateway.text.grammar_process import GrammarKind, Wanted


def wanted_structure(body: GeneratingBody) -> Wanted | None:
    """Raises `RequestError`, also for more than one."""
    found = [*_of_response_format(body.response_format), *_of_structured_outputs(body.structured_outputs)]
    found += _of_parts("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    if len(found) > 1:
        raise RequestError(
            f"{found[1].param}: the answer is bound by {found[0].param} already; name one of them.",
            param=found[1].param,
        )
    if found and body.ignore_eos:
        raise RequestError(
            f"ignore_eos: an answer that is bound ({found[0].param}) ends where its grammar does.", param="ignore_eos"
        )
    return found[0] if found else None


def _of_response_format(wish: ResponseFormat | None) -> list[Wanted]:
    if wish is None:
        return []
    match wish.type:
        case "text":
            return []
        case "json_object":
            return [Wanted("json_schema", {"type": "object"}, "response_format")]
        case "json_schema":
            if wish.json_schema is None or wish.json_schema.schema is None:
                raise RequestError(
                    "response_format.json_schema.schema is missing.", param="response_format.json_schema.schema"
                )
            return [_schema(wish.json_schema.schema, "response_format.json_schema.schema")]
        case other:
            raise RequestError(
                f"response_format.type: {other[:100]!r} is none of 'text', 'json_object' and 'json_schema'.",
                param="response_format.type",
            )


def _of_structured_outputs(wish: StructuredOutputs | None) -> list[Wanted]:
    if wish is None:
        return []
    for name in ("structural_tag", "whitespace_pattern"):
        if getattr(wish, name) is not None:
            raise RequestError(f"structured_outputs.{name}: not supported.", param=f"structured_outputs.{name}")
    found = _of_parts("structured_outputs.", wish.json, wish.regex, wish.choice, wish.grammar)
    if wish.json_object:
        found.append(Wanted("json_schema", {"type": "object"}, "structured_outputs.json_object"))
    if wish.disable_any_whitespace:
        found = [_without_white_space(each) for each in found]
    return found


def _of_parts(
    prefix: str, schema: Any, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[Wanted]:
    found = [] if schema is None else [_schema(schema, f"{prefix}json")]
    parts: tuple[tuple[GrammarKind, Any], ...] = (("regex", regex), ("choice", choice), ("grammar", grammar))
    return found + [Wanted(kind, content, f"{prefix}{kind}") for kind, content in parts if content is not None]


def _schema(schema: Any, param: str) -> Wanted:
    """A schema, or its text, as vLLM also takes it."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise RequestError(f"{param}: the text is not valid JSON: {error}", param=param) from error
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{param} must be a JSON schema: an object, true or false.", param=param)
    return Wanted("json_schema", schema, param)


def _without_white_space(wanted: Wanted) -> Wanted:
    if wanted.kind != "json_schema" or not isinstance(wanted.content, dict):
        return wanted
    compact = {"whitespace_flexible": False}
    return Wanted("json_schema", {"x-guidance": compact, **wanted.content}, wanted.param)
