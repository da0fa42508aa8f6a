"""Calls of tools in a stream of text: one reader per family of models, fed with any pieces, never looking back.

    Hermes, Qwen   <tool_call>{"name": …, "arguments": {…}}</tool_call> …
    Llama 3        {"name": …, "parameters": {…}}; …            at the answer's beginning, <|python_tag|> may precede
    Mistral        [TOOL_CALLS][{"name": …, "arguments": {…}}, …]   or   [TOOL_CALLS]name[ARGS]{…} …

A reader takes one character at a time, so how a stream was cut can make no difference. A call is announced as soon as
its name is known and its arguments begin, and they follow as they come; a text that only began like a call is content.
White space around calls is dropped. Called by `answering.py`; knows no tokens and no HTTP.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import msgspec

from cohort.services.gateway.generation.answer_parts import CallDelta, stable_id, stable_letters
from cohort.services.gateway.requests.tools import ToolFormat

END = ""
"""Input of a reader after the last character."""
_HEAD_CHARACTERS = 512
"""Characters within which arguments must begin; later ones are read when the call is whole."""
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{', re.DOTALL)
_NAME = re.compile(r"\s*([A-Za-z0-9_.:-]{1,256})\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*")

Reading = Generator[None, str, None]


@dataclass(frozen=True, slots=True)
class Found:
    """Content and tool calls parsed from some text."""

    content: str
    calls: tuple[CallDelta, ...]


class ToolParser:
    def __init__(self, format_: ToolFormat, *, parallel: bool, ids: str = "") -> None:
        """`parallel` False ends with the first call. `ids`: source of the calls' ids; "" = random."""
        self._format = format_
        self._ids = ids or secrets.token_hex(16)
        self._parallel = parallel
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []
        self._arguments: list[str] = []
        """Pieces of the last call's arguments that no delta has yet."""
        self._white = ""
        self.calls = 0
        """Calls that have begun."""
        self.ended = False
        """Whether the rest is ignored."""
        self._reading = self._begin()
        next(self._reading)

    def feed(self, text: str) -> Found:
        for character in text:
            if self.ended:
                break
            self._send(character)
        return self._found()

    def finish(self) -> Found:
        """End the answer: text held back is content after all."""
        if not self.ended:
            self._send(END)
            self.ended = True
        return self._found()

    def _send(self, character: str) -> None:
        try:
            self._reading.send(character)
        except StopIteration:
            self.ended = True

    def _found(self) -> Found:
        self._end_arguments()
        found = Found("".join(self._content), tuple(self._deltas))
        self._content, self._deltas = [], []
        return found

    def _begin(self) -> Reading:
        match self._format.family:
            case "hermes":
                return self._marked(self._hermes_call)
            case "mistral":
                return self._marked(self._mistral_calls)
            case "llama3":
                return self._llama()

    def _marked(self, read_calls: Callable[[], Reading]) -> Reading:
        """Read content, and calls after the marker."""
        marker = self._format.marker
        while (yield from self._content_until(marker)):
            yield from read_calls()
            if self.calls and not self._parallel:
                return

    def _hermes_call(self) -> Reading:
        marker, close = self._format.marker, self._format.close
        raw: list[str] = []
        while (character := (yield)) != END:
            raw.append(character)
            if character == "{" and (head := _head(raw)):
                self._emit_call(_text(head))
                yield from self._read_arguments()
                yield from self._skip_past(close)
                return
            if character == ">" and "".join(raw[-len(close) :]) == close:
                if not self._whole_call("".join(raw[: -len(close)])):
                    self._reject(marker + "".join(raw))
                return
        self._reject(marker + "".join(raw))

    def _mistral_calls(self) -> Reading:
        marker, raw = self._format.marker, ""
        while (character := (yield)) != END:
            raw += character
            if character == "[" and not raw[:-1].strip():
                yield from self._mistral_list(marker + raw)
                return
            if character == "{":
                name = _NAME.fullmatch(raw[:-1])
                if name is None:
                    if not (yield from self._object(raw)):
                        self._reject(marker + raw)
                    return
                self._emit_call(name[1])
                yield from self._read_arguments()
                return
            if len(raw) > _HEAD_CHARACTERS:
                break
        self._reject(marker + raw)

    def _mistral_list(self, before: str) -> Reading:
        while (character := (yield)) != END:
            if character == "{":
                text = yield from self._object(character)
                if text:
                    self._reject(before + text)
                    return
                before = ""
                if not self._parallel:
                    return
            elif character == "]" or not (character == "," or character.isspace()):
                if character != "]" or before:
                    self._reject(before + character)
                return
        self._reject(before)

    def _llama(self) -> Reading:
        """Read calls at the beginning, or the whole answer as text."""
        tag = self._format.marker
        lead: list[str] = []  # white space included
        begun = ""  # of the tag
        while (character := (yield)) != END:
            if character == "{":
                text = yield from self._object(character)
                if text:
                    self._emit_text("".join(lead) + text)
                    yield from self._plain()
                    return
                lead, begun = [], ""
                if not self._parallel:
                    return
            elif character.isspace() or (character == ";" and self.calls and not begun):
                if self.calls:
                    lead, begun = [], ""
                else:
                    lead.append(character)
                    begun = begun and f"{tag} "  # which is no tag any more
            else:
                lead.append(character)
                begun += character
                if begun == tag:
                    lead, begun = [], ""
                elif not tag.startswith(begun):
                    self._emit_text("".join(lead))
                    yield from self._plain()
                    return
        if begun or not self.calls:
            self._emit_text("".join(lead))

    def _content_until(self, marker: str) -> Generator[None, str, bool]:
        """Read content; return whether the marker came. White space is held until it is known that no call follows."""
        white: list[str] = []  # held before `tail`, which is the marker's beginning
        tail = ""
        while (character := (yield)) != END:
            tail += character
            if tail == marker:
                self._white = "".join(white)
                return True
            content, blank, tail = _split(tail, marker)
            if content:
                self._emit_text("".join(white) + content)
                white.clear()
            if blank:
                white.append(blank)
        if tail or not self.calls:
            self._emit_text("".join(white) + tail)
        return False

    def _plain(self) -> Reading:
        while (character := (yield)) != END:
            self._emit_text(character)

    def _object(self, start: str) -> Generator[None, str, str]:
        """Read a call that starts with `start`. Return "" if it is one (its arguments begin), else its text."""
        raw, depth = [*start], start.count("{")
        in_string = escaped = False
        while (character := (yield)) != END:
            raw.append(character)
            if in_string:
                in_string = escaped or character != '"'
                escaped = character == "\\" and not escaped
                continue
            in_string = character == '"'
            if character == "{":
                depth += 1
                if depth == 2 and (head := _head(raw)):
                    self._emit_call(_text(head))
                    yield from self._read_arguments()
                    yield from self._skip_past("}")
                    return ""
            elif character == "}":
                depth -= 1
                if not depth:
                    text = "".join(raw)
                    return "" if self._whole_call(text) else text
        return "".join(raw)

    def _read_arguments(self) -> Reading:
        """Read to the brace that closes the one that was read."""
        self._emit_arguments("{")
        depth = 1
        in_string = escaped = False
        while depth and (character := (yield)) != END:
            self._emit_arguments(character)
            if in_string:
                in_string = escaped or character != '"'
                escaped = character == "\\" and not escaped
            elif character == '"':
                in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1

    def _skip_past(self, close: str) -> Reading:
        last = ""
        while not last.endswith(close) and (character := (yield)) != END:
            last = (last + character)[-len(close) :]

    def _whole_call(self, text: str) -> bool:
        """Read a call with its keys in another order, or its arguments as a string; return whether it is one."""
        try:
            call = msgspec.json.decode(text.strip())
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return False
        if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
            return False
        arguments = call.get("arguments", call.get("parameters"))
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict | str):
            return False
        self._emit_call(name)
        self._emit_arguments(arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode())
        return True

    def _reject(self, text: str) -> None:
        """Return text that only began like a call to the content."""
        self._emit_text(self._white + text if text else "")
        self._white = ""

    def _emit_text(self, text: str) -> None:
        if text:
            self._content.append(text)

    def _emit_call(self, name: str) -> None:
        self._white = ""
        self._end_arguments()
        self._deltas.append(CallDelta(self.calls, call_id(self._format, self._ids, self.calls), name))
        self.calls += 1

    def _emit_arguments(self, text: str) -> None:
        self._arguments.append(text)

    def _end_arguments(self) -> None:
        """Move the arguments to the delta that announces their call, or to one of their own."""
        if self._arguments:
            if not self._deltas:
                self._deltas.append(CallDelta(self.calls - 1))
            assert not self._deltas[-1].arguments, "a call's arguments are joined once for each piece of text"
            self._deltas[-1].arguments = "".join(self._arguments)
            self._arguments.clear()


def _head(raw: Sequence[str]) -> str:
    """Return the name of a call whose arguments begin with the last character, in quotes; "" if none do, or late."""
    head = _HEAD.fullmatch("".join(raw)) if len(raw) <= _HEAD_CHARACTERS else None
    return "" if head is None else head[1]


def _split(text: str, marker: str) -> tuple[str, str, str]:
    """Split a text, no longer than the marker, into content, white space and the longest beginning of the marker."""
    partial = next(n for n in range(min(len(text), len(marker) - 1), -1, -1) if text.endswith(marker[:n]))
    before = text[: len(text) - partial]
    content = before.rstrip()
    return content, before[len(content) :], text[len(text) - partial :]


def _text(quoted: str) -> str:
    """Decode a JSON string, or take off its quotes if it is not valid."""
    try:
        return str(msgspec.json.decode(quoted))
    except (msgspec.DecodeError, UnicodeError):
        return quoted[1:-1]


def whole_deltas(first: Sequence[CallDelta], second: Sequence[CallDelta]) -> Sequence[CallDelta]:
    return (*first, *second) if first and second else first or second


def call_id(format_: ToolFormat, ids: str, number: int) -> str:
    """Return the id of call `number`; `ids` is the answer's own."""
    if format_.family == "mistral":  # whose templates take ids of nine letters and digits only
        return stable_letters(9, ids, number)
    return f"call_{stable_id(ids, number)[:24]}"
