"""The model's own chat template: messages to the prompt text the model was trained on.

Renders as transformers does, in jinja's sandbox. Called by `tokenizer.py`. No message is repaired: a refusal is a 400.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cohort.common.errors import ModelError, RequestError
from cohort.common.json_files import MOST_BYTES

_MARK = "ContinueThisMessageHere "
"""Last word of a message to be continued; its space shows whether the template cuts white space off."""


class ChatTemplate:
    """A compiled template. `special_tokens` (bos_token, eos_token …) are visible to it by name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._template = _environment().from_string(source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Render the messages. Raises `RequestError` with the template's own text when it refuses them."""
        # A key that is null and a key that is absent mean the same to a client; templates only know the latter.
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        names = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **variables,
            "messages": chat,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(**names)
        except jinja2.TemplateError as error:
            raise RequestError(f"The model's chat template refused the messages: {error}", param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            # The template is a program that ran into data it does not expect: still the client's messages.
            raise RequestError(
                f"The model's chat template failed on the messages: {type(error).__name__}: {error}", param="messages"
            ) from error


def to_be_continued(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Mark the end of the last message's text, which `up_to_continuation` finds in what the template made of it."""
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _MARK}]


def up_to_continuation(text: str) -> str:
    """Return a rendered chat up to the end of its last message, as transformers does: a template that cuts white space
    off cuts it here too. Raises `RequestError` for one that does not write that message."""
    end = text.rfind(_MARK.rstrip())
    if end < 0:
        raise RequestError(
            "continue_final_message: the model's chat template does not write this last message, so that nothing can "
            "continue it.",
            param="continue_final_message",
        )
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()


def load_template_source(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Return chat_template.jinja, else the template in tokenizer_config.json (of several, the one named default)."""
    file = model_dir / "chat_template.jinja"
    template = tokenizer_config.get("chat_template")
    try:
        if file.is_file():
            if (size := file.stat().st_size) > MOST_BYTES:
                raise ValueError(f"it has {size} bytes; at most {MOST_BYTES} are served")
            return file.read_text(encoding="utf-8")
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default") or next(iter(named.values()), None)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{model_dir}: its chat template cannot be read: {error!r}") from error
    return template if isinstance(template, str) else None


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks assistant text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Dict:
    """`dict` as templates may use it: a constructor without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    # Local time, as the reference renders it.
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    return environment
