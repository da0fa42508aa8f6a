"""How families of models write reasoning and calls of tools: one row each, chosen by marks in the chat template.

A row is data: which texts mark what, and where the arguments of a call stand. `generation/answer_reader.py` reads every
answer by its row, `call_grammars.py` makes the grammar of calls from it, and `tools.py` gives earlier turns to the
template as the row wants them. Marks are those of the models' published templates. Pure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cohort.common.errors import ModelError

Body = Literal["json", "named", "tags", "channels", "none"]
"""Form of a call: a JSON object with name and arguments, or a list of them; a name before its arguments' JSON; a name
before tags around each argument; a message of a channel. none: calls are not read."""
Place = Literal["variable", "system", "text"]
"""Place of the tools: the template's variable; the key `tools` of the system message; the text of that message."""
NAME = r"[A-Za-z0-9_.-]{1,256}"
"""Function's name in a pattern of `AnswerFormat.head`."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Text before a part and text after it; "" = none."""

    begin: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class Tags:
    """Marks around a function's name, each key and each value. `end` follows the last value."""

    name: Marks
    key: Marks
    value: Marks
    end: str


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """One family's form of answers."""

    name: str
    signs: tuple[str, ...]
    """Texts that its chat template has, all of them."""
    body: Body
    call: Marks = Marks()
    """Marks around a call, or around a list of them. Without an end it ends by itself."""
    section: Marks = Marks()
    """Marks around all calls."""
    between: str = ""
    """Text between two calls."""
    head: str = ""
    """Pattern of what precedes named arguments: group `name`, and `id` where the model writes one."""
    written: Marks = Marks()
    """Texts around a name before its arguments; `{index}` is the call's number."""
    tail: str = ""
    """Text after named arguments, before the call's end."""
    pad: str = ""
    """Text between the marks of a call and its object."""
    listed: bool = False
    """Whether several calls are written as one list."""
    key: str = "arguments"
    """Key of a JSON call's arguments."""
    bare: bool = False
    """Whether calls may stand at the answer's beginning without a mark."""
    fences: tuple[str, ...] = ()
    """Other texts around such calls."""
    tags: Tags | None = None
    reasoning: tuple[Marks, ...] = (Marks("<think>", "</think>"),)
    """Marks that reasoning may have; those that the template or the tokenizer has count. None in channels."""
    dropped: tuple[str, ...] = ()
    """Marks around the answer that say nothing."""
    place: Place = "variable"
    reasoning_key: str = "reasoning_content"
    """Key of an earlier answer's reasoning in a message for the template."""
    arguments_text: bool = False
    """Whether the template takes an earlier call's arguments as text, not as an object."""
    id_letters: int = 0
    """Letters and digits of a call's id, where templates take no others; 0 = any id."""
    efforts: Mapping[str, str] = field(default_factory=dict)
    """Words of `reasoning_effort` that the template does not know, and those that it knows."""
    ids: Mapping[str, int] = field(default_factory=dict)
    """Marks that are tokens of their own."""

    @property
    def reads_calls(self) -> bool:
        return self.body != "none" and not (self.body == "channels" and self.place == "text")

    @property
    def reasons(self) -> bool:
        return bool(self.reasoning) or self.body == "channels"

    @property
    def call_mark_ids(self) -> frozenset[int]:
        """Tokens that must be readable in the text of an answer with calls although they are special ones."""
        return frozenset(self.ids.values())

    @property
    def reasoning_mark_ids(self) -> frozenset[int]:
        """The same of an answer whose calls are not read."""
        texts = CHANNELS if self.body == "channels" else (*self._reasoning_texts(), *self.dropped)
        return frozenset(self.ids[text] for text in texts if text in self.ids)

    def reasoning_at(self, prompt_end: str) -> Literal["", "begun", "ended"]:
        """Return whether a prompt ends where reasoning has begun, or has ended."""
        text = prompt_end.rstrip()
        for marks in self.reasoning:
            return "begun" if text.endswith(marks.begin) else "ended" if text.endswith(marks.end) else ""
        return ""

    def free_start(self, prompt_end: str, encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], int]:
        """Return `grammar_opens` and `grammar_closes` for an answer that may reason before what binds it: -1 where its
        prompt has ended reasoning, or the marks are no tokens."""
        if self.body == "channels":
            closes = self.ids.get(END, -1)
            return (tuple(encode(f"{CHANNEL}analysis")), closes) if CHANNEL in self.ids else ((), -1)
        where = self.reasoning_at(prompt_end)
        for marks in self.reasoning:
            closes = self.ids.get(marks.end, -1)
            if where == "begun" or closes < 0:
                return (), closes
            if where == "" and marks.begin in self.ids:
                return (self.ids[marks.begin],), closes
        return (), -1

    def _reasoning_texts(self) -> Iterator[str]:
        for marks in self.reasoning:
            yield from (marks.begin, marks.end)

    def texts(self) -> Iterator[str]:
        """Yield all marks, "" included."""
        yield from self._reasoning_texts()
        yield from (*self.dropped, self.call.begin, self.call.end, self.section.begin, self.section.end)
        yield from re.findall(r"<[|｜]\S+?[|｜]>|\[\w+\]", self.head.replace("\\", ""))
        if self.tags is not None:
            for marks in (self.tags.key, self.tags.value):
                yield from (marks.begin, marks.end)
        if self.body == "channels":
            yield from CHANNELS


CHANNELS = CHANNEL, MESSAGE, CONSTRAIN, START, END, CALL, RETURN = (
    "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip
"""Marks of Harmony, gpt-oss' format: a header up to MESSAGE, a body up to END, CALL or RETURN."""

_HERMES = Marks("<tool_call>", "</tool_call>")
_DEEPSEEK = AnswerFormat(
    "deepseek-v3.1",
    ("<｜tool▁calls▁begin｜>",),
    "named",
    call=Marks("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    section=Marks("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    head=rf"\s*(?:function<｜tool▁sep｜>)?(?P<name>{NAME})(?:<｜tool▁sep｜>|\s*```json)\s*",
    written=Marks("", "<｜tool▁sep｜>"),
    arguments_text=True,
)
_MISTRAL = AnswerFormat(
    "mistral",
    ("[TOOL_CALLS]",),
    "json",
    call=Marks("[TOOL_CALLS]"),
    listed=True,
    head=rf"\s*(?P<name>{NAME})\s*(?:\[CALL_ID\]\s*(?P<id>\w*)\s*)?(?:\[ARGS\])?\s*",
    reasoning=(Marks("[THINK]", "[/THINK]"), Marks("<think>", "</think>")),
    id_letters=9,
)
ROWS = (
    AnswerFormat(
        "gpt-oss",
        (CHANNEL, MESSAGE),
        "channels",
        reasoning=(),
        reasoning_key="thinking",
        efforts={"none": "low", "minimal": "low", "xhigh": "high", "max": "high"},
    ),
    AnswerFormat(
        "kimi-k2",
        ("<|tool_calls_section_begin|>",),
        "named",
        call=Marks("<|tool_call_begin|>", "<|tool_call_end|>"),
        section=Marks("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        head=rf"\s*(?P<id>(?:functions\.)?(?P<name>{NAME}):\d+)\s*<\|tool_call_argument_begin\|>\s*",
        written=Marks("functions.", ":{index}<|tool_call_argument_begin|>"),
    ),
    dataclasses.replace(
        _DEEPSEEK,
        name="deepseek-v3",
        signs=("<｜tool▁calls▁begin｜>", "```json"),
        between="\n",
        written=Marks("function<｜tool▁sep｜>", "\n```json\n"),
        tail="\n```",
    ),
    _DEEPSEEK,
    dataclasses.replace(
        _MISTRAL,
        name="mistral-args",
        signs=("[TOOL_CALLS]", "[ARGS]"),
        body="named",
        listed=False,
        written=Marks("", "[ARGS]"),
    ),
    _MISTRAL,
    AnswerFormat(
        "glm-4",
        ("<arg_key>", "<arg_value>"),
        "tags",
        call=_HERMES,
        between="\n",
        tags=Tags(Marks("", "\n"), Marks("<arg_key>", "</arg_key>\n"), Marks("<arg_value>", "</arg_value>"), ""),
    ),
    AnswerFormat(
        "qwen3-coder",
        ("<function=", "<parameter="),
        "tags",
        call=_HERMES,
        between="\n",
        tags=Tags(
            Marks("\n<function=", ">\n"), Marks("<parameter=", ">"), Marks("", "\n</parameter>"), "</function>\n"
        ),
    ),
    AnswerFormat("phi-4", ("<|tool_call|>", "<|/tool_call|>"), "json", call=Marks("<|tool_call|>", "<|/tool_call|>")),
    AnswerFormat(
        "phi-4-system",
        ("<|tool|>", "message['tools']"),
        "json",
        call=Marks("<|tool_call|>", "<|/tool_call|>"),
        place="system",
    ),
    AnswerFormat(
        "granite",
        ("<|tool_call|>",),
        "json",
        call=Marks("<|tool_call|>"),
        listed=True,
        reasoning=(Marks("Here is my thought process:", "Here is my response:"), Marks("<think>", "</think>")),
        dropped=("<response>", "</response>"),
    ),
    AnswerFormat("hermes", ("<tool_call>", "tools"), "json", call=_HERMES, between="\n", pad="\n"),
    AnswerFormat(
        "llama-3", ("<|python_tag|>",), "json", call=Marks("<|python_tag|>"), between="; ", key="parameters", bare=True
    ),
    AnswerFormat(
        "llama-3", ("ipython", '"parameters"'), "json", call=Marks("<|python_tag|>"), between="; ", key="parameters",
        bare=True,
    ),
    AnswerFormat(
        "gemma-3", ("<start_of_turn>",), "json", call=Marks("```tool_code", "```"), key="parameters", bare=True,
        fences=("```json",), place="text",
    ),
    AnswerFormat("think", (), "json", call=_HERMES, between="\n", pad="\n", place="text"),
)  # fmt: skip
"""The families, the more special marks first."""
NAMES = tuple(dict.fromkeys(row.name for row in ROWS))


def answer_format(
    template: str | None, token_id: Callable[[str], int | None], wanted: str = "auto"
) -> AnswerFormat | None:
    """Return the form of a chat template's answers; None without a template. `token_id` finds an added token. `wanted`:
    a row's name, or auto. Raises `ModelError` for an unknown name."""
    if wanted != "auto" and wanted not in NAMES:
        raise ModelError(f"model.tool_format: {wanted[:80]!r} is none of auto, {', '.join(NAMES)}")
    if template is None:
        return None
    rows = [row for row in ROWS if row.name == wanted] or ROWS
    row = next((row for row in rows if all(sign in template for sign in row.signs)), rows[-1])
    if row.place == "text" and "tools" in template and wanted == "auto":
        row = dataclasses.replace(row, body="none")  # calls in a form that is not known
    elif "tools" not in template:
        row = dataclasses.replace(row, place="text", body=row.body if row.body in ("json", "channels") else "none")
    reasoning = [marks for marks in row.reasoning if marks.end in template or token_id(marks.end) is not None]
    row = dataclasses.replace(row, reasoning=tuple(reasoning[:1]), dropped=row.dropped if reasoning else ())
    ids = ((text, token_id(text)) for text in row.texts() if text)
    return dataclasses.replace(row, ids={text: found for text, found in ids if found is not None})
