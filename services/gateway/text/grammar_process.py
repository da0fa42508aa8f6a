"""Compiles the grammars of requests before anything else is done for them, in a process of its own.

A client's schema of a few kilobytes may take minutes to compile or overflow the stack. Here that ends a bounded process
(`bounded_process.py`) and becomes a 400 that names the field. Workers compile a grammar that passes again, by the same
library and limits (`common/grammar.py`). They are compiled one after the other (`QuestionQueue`), and what passed
lately not again.

Called by `generator.py`; the process starts with the first grammar.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, assert_never

import msgspec

from cohort.common import grammar
from cohort.common.errors import ModelError, RequestError
from cohort.common.grammar import GrammarError, GrammarTokens
from cohort.services.gateway import bounds
from cohort.services.gateway.http.ignored_fields import note
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

GrammarKind = Literal["json_schema", "open_json_schema", "regex", "choice", "grammar", "lark"]

_UNIQUE = re.compile(rb'\\*"uniqueItems\\*": ?true')
"""Keyword of a schema, or of one within the text of a grammar of tools, that a grammar leaves out."""
_START_CPU_S = 20.0
# Less than the threads of a worker have: what fits here fits there.
_STACK_BYTES = 1 << 20


class GrammarSpec(msgspec.Struct, frozen=True):
    """Structure of an answer as the client wrote it, and its field (`param`). Objects of an `open_json_schema` take
    properties that it does not name; `lark` is the gateway's own."""

    kind: GrammarKind
    content: Any
    param: str


class GrammarCompiler:
    def __init__(self, tokenizer: str, end_tokens: Sequence[int]) -> None:
        limits = Limits(bounds.BOUNDS.grammar_cpu_s, bounds.BOUNDS.grammar_memory_bytes, _START_CPU_S)
        about = {"tokenizer": tokenizer, "end_tokens": list(end_tokens)}
        self._process = BoundedProcess(__name__, about, limits, "Structured output is not possible with this model")
        self._queue = QuestionQueue(self._process.begin, "grammars", lambda: bounds.BOUNDS.grammars_waiting)
        self._passed: OrderedDict[bytes, str] = OrderedDict()
        self._passed_bytes = 0

    async def compile(self, wanted: GrammarSpec, owner: str = "") -> str:
        """Return the grammar's text for workers. `owner`: of the request, whose grammars wait in turn with others'.
        Raises `RequestError`."""
        question = msgspec.json.encode((wanted.kind, wanted.content))
        if len(question) > (most := bounds.BOUNDS.grammar_bytes):
            raise RequestError(
                f"{wanted.param} has {len(question)} bytes, but at most {most} are taken.", param=wanted.param
            )
        if _UNIQUE.search(question):
            note("uniqueItems")
        known = self._passed.get(question)
        if known is not None:
            self._passed.move_to_end(question)
            return known
        try:
            kind, answer = await self._queue.ask(owner, question)
        except Ended as ended:
            raise RequestError(
                f"{wanted.param}: the grammar was given up: {ended.why}.",
                status=503 if ended.status is None else 400,
                param=wanted.param,
            ) from None
        except ModelError as error:
            raise RequestError(f"{wanted.param}: {error}", param=wanted.param) from error
        text = answer.decode()
        if kind == REFUSED:
            raise RequestError(f"{wanted.param}: {text}", param=wanted.param)
        self._keep(question, text)
        return text

    def _keep(self, question: bytes, text: str) -> None:
        """Keep a grammar that passed; what was used least recently goes."""
        if question in self._passed:  # of several requests with it
            return
        self._passed[question] = text
        self._passed_bytes += len(question) + len(text)
        while self._passed_bytes > bounds.BOUNDS.grammars_passed_bytes:
            oldest, its_text = self._passed.popitem(last=False)
            self._passed_bytes -= len(oldest) + len(its_text)
        assert self._passed_bytes >= 0, f"{self._passed_bytes} bytes of {len(self._passed)} grammars"


def text_of(kind: GrammarKind, content: Any) -> str:
    """Return the grammar's text. Raises `GrammarError`."""
    match kind:
        case "json_schema":
            return grammar.of_json_schema(content)
        case "open_json_schema":
            return grammar.of_json_schema(content, closes=False)
        case "regex":
            return grammar.of_regex(content)
        case "choice":
            return grammar.of_choice(content)
        case "grammar":
            return grammar.of_grammar(content)
        case "lark":
            return grammar.of_lark(content)
        case _:
            assert_never(kind)


# -- Inside the process ------------------------------------------------------------------------------------------


def begin(about: Mapping[str, Any], _output_bytes: int) -> Work:
    tokens = GrammarTokens(about["tokenizer"], about["end_tokens"])
    _ = tokens.account_s  # measured now, not in the time of the first grammar that is dear
    threading.stack_size(_STACK_BYTES)
    thread = ThreadPoolExecutor(1)
    return lambda data: thread.submit(_compiled, tokens, data).result()


def _compiled(tokens: GrammarTokens, data: bytes) -> tuple[bytes, bytes]:
    try:
        kind, content = msgspec.json.decode(data)
        text = text_of(kind, content)
        tokens.check_first(tokens.compile(text))
    except (GrammarError, RecursionError, ValueError) as error:
        return REFUSED, short(str(error) or type(error).__name__)
    return ANSWER, text.encode()


if __name__ == "__main__":
    sys.exit(serve(begin))
