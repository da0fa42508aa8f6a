"""Compiles the grammars of requests before anything else is done for them, in a process of its own.

A client's schema of a few kilobytes may take minutes to compile or overflow the stack. Here that ends a bounded process
(`bounded_process.py`) and becomes a 400 that names the field. Workers compile a grammar that passes again, by the same
library and limits (`common/grammar.py`). Recent ones are not asked about again.

Called by `generator.py`; the process starts with the first grammar.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, assert_never

import msgspec
import numpy as np

from cohort.common import grammar
from cohort.common.errors import ModelError, RequestError
from cohort.common.grammar import GrammarError, GrammarTokens
from cohort.services.gateway import bounds
from cohort.services.gateway.text.bounded_process import (
    ANSWER,
    REFUSED,
    BoundedProcess,
    Ended,
    Limits,
    Work,
    serve,
    short,
)

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]

_REMEMBERED = 256
_START_CPU_S = 20.0
# Less than the threads of a worker have: what fits here fits there.
_STACK_BYTES = 1 << 20


class GrammarSpec(msgspec.Struct, frozen=True):
    """Structure of an answer as the client wrote it, and its field (`param`). `lark` is the gateway's own."""

    kind: GrammarKind
    content: Any
    param: str


class GrammarCompiler:
    def __init__(self, tokenizer: str, end_tokens: Sequence[int]) -> None:
        limits = Limits(bounds.BOUNDS.grammar_cpu_s, bounds.BOUNDS.grammar_memory_bytes, _START_CPU_S)
        about = {"tokenizer": tokenizer, "end_tokens": list(end_tokens)}
        self._process = BoundedProcess(__name__, about, limits, "Structured output is not possible with this model")
        self._passed: OrderedDict[bytes, str] = OrderedDict()

    async def compile(self, wanted: GrammarSpec) -> str:
        """Return the grammar's text for workers. Raises `RequestError`."""
        question = msgspec.json.encode((wanted.kind, wanted.content))
        if len(question) > (most := bounds.BOUNDS.grammar_bytes):
            raise RequestError(
                f"{wanted.param} has {len(question)} bytes, but at most {most} are taken.", param=wanted.param
            )
        known = self._passed.get(question)
        if known is not None:
            self._passed.move_to_end(question)
            return known
        loop = asyncio.get_running_loop()
        try:
            kind, answer = await loop.run_in_executor(self._process.executor, self._process.call, question)
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
        self._passed[question] = text
        if len(self._passed) > _REMEMBERED:
            self._passed.popitem(last=False)
        return text


def text_of(kind: GrammarKind, content: Any) -> str:
    """Return the grammar's text. Raises `GrammarError`."""
    match kind:
        case "json_schema":
            return grammar.of_json_schema(content)
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
    threading.stack_size(_STACK_BYTES)
    thread = ThreadPoolExecutor(1)
    return lambda data: thread.submit(_compiled, tokens, data).result()


def _compiled(tokens: GrammarTokens, data: bytes) -> tuple[bytes, bytes]:
    try:
        kind, content = msgspec.json.decode(data)
        text = text_of(kind, content)
        # The first mask is often the dearest: a grammar that cannot afford it could never begin.
        tokens.compile(text).mask(np.zeros(tokens.words, dtype=np.int32))
    except (GrammarError, RecursionError, ValueError) as error:
        return REFUSED, short(str(error) or type(error).__name__)
    return ANSWER, text.encode()


if __name__ == "__main__":
    sys.exit(serve(begin))
