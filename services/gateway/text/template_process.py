"""A chat template in a process of its own: the model's folder decides what it does, the limits how much of it.

Jinja's sandbox does not keep a template from looping for ever, nor from 'a' * 10**9; a bounded process
(`bounded_process.py`) does. Compilation is inside the limits, because jinja computes constants then.

Time, memory and output are bounded, and the event loop runs no line of a template. Chats wait in turn of their keys
(`QuestionQueue`); short chats have one process and long ones another. Called by `tokenizer.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from cohort.common.errors import ModelError, RequestError
from cohort.services.gateway import bounds
from cohort.services.gateway.text.bounded_process import (
    ANSWER,
    REFUSED,
    BoundedProcess,
    Ended,
    Limits,
    QuestionQueue,
    Work,
    serve,
    short,
)
from cohort.services.gateway.text.chat_template import ChatTemplate

_SHORT_BYTES = 8192
"""Size of messages, as JSON, that count as short."""
_TOGETHER = 32
"""Short chats asked in one message."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Limits of one chat, and of the template's compilation; beyond: 400. A prompt may have an eighth of the memory."""

    cpu_s: float = 5.0
    memory_bytes: int = 512 << 20

    def of_process(self) -> Limits:
        return Limits(self.cpu_s, self.memory_bytes, self.cpu_s)


class ChatRenderer:
    """Chat template in two processes, so that short chats never wait for long ones. Safe to use from threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], limits: TemplateLimits) -> None:
        about = {"source": source, "special_tokens": dict(special_tokens)}
        broken = "The model's chat template cannot be used"
        self._short = BoundedProcess(__name__, about, limits.of_process(), broken)
        self._long = BoundedProcess(__name__, about, limits.of_process(), broken)
        self._queues = {
            each: QuestionQueue(each.begin, "chats", lambda: bounds.BOUNDS.chats_waiting, together)
            for each, together in ((self._short, _TOGETHER), (self._long, 1))
        }

    def warm(self) -> None:
        """Start what the first chat needs. Raises `ModelError` when the template cannot be compiled."""
        self._short.warm()

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Return the rendered messages; blocks. Raises `RequestError` for a refusal or an exceeded limit."""
        data = _encoded(messages, add_generation_prompt, variables)
        with _refusals():
            answer = self._process_for(data).call(data)
        return _text_of(*answer)

    async def render_soon(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        owner: str = "",
    ) -> str:
        """Render in the turn of `owner`, in a thread; a caller that is cancelled before its turn leaves the queue.
        Raises a 429 `RequestError` too, while too many wait."""
        data = _encoded(messages, add_generation_prompt, variables)
        with _refusals():
            answer = await self._queues[self._process_for(data)].ask(owner, data)
        return _text_of(*answer)

    def _process_for(self, data: bytes) -> BoundedProcess:
        return self._short if len(data) <= _SHORT_BYTES else self._long


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except Ended as ended:
        status = 503 if ended.status is None else 400
        raise RequestError(
            f"The model's chat template was stopped: {ended.why}.", status=status, param="messages"
        ) from None
    except ModelError as error:
        raise RequestError(str(error), param="messages") from error


def _text_of(kind: bytes, answer: bytes) -> str:
    text = answer.decode()
    if kind == REFUSED:
        raise RequestError(text, param="messages")
    return text


def _encoded(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]) -> bytes:
    chat = {"messages": messages, "add_generation_prompt": add_generation_prompt, "variables": variables}
    try:
        try:
            return msgspec.json.encode(chat)
        except OverflowError:  # an integer beyond 64 bits, which a template may print
            return json.dumps(chat).encode()
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RequestError(f"The messages cannot be given to the chat template: {error}", param="messages") from error


# -- Inside the process ------------------------------------------------------------------------------------------


def begin(about: Mapping[str, Any], output_bytes: int) -> Work:
    template = ChatTemplate(about["source"], about["special_tokens"])
    return lambda data: _rendered(template, data, output_bytes)


def _rendered(template: ChatTemplate, data: bytes, output_bytes: int) -> tuple[bytes, bytes]:
    try:
        chat = json.loads(data)
        text = template.render(
            chat["messages"], add_generation_prompt=chat["add_generation_prompt"], variables=chat["variables"]
        )
        answer = text.encode()
    except RequestError as error:
        return REFUSED, short(error.message)
    except (UnicodeEncodeError, RecursionError, ValueError) as error:
        return REFUSED, short(f"The model's chat template failed on the messages: {type(error).__name__}: {error}")
    if len(answer) > output_bytes:
        return REFUSED, short(
            f"The model's chat template made a prompt of {len(answer)} bytes; the most is {output_bytes}."
        )
    return ANSWER, answer


if __name__ == "__main__":
    sys.exit(serve(begin))
