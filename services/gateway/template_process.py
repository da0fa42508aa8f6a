"""A chat template in a process of its own: the model's folder decides what it does, the limits how much of it.

    gateway ──frame: messages──▶ template process ──frame: prompt, or the refusal──▶ gateway

Jinja's sandbox keeps a template from the interpreter, but not from looping for ever, nor from 'a' * 10**9, and neither
is interruptible inside one process. Here both end: the kernel kills the process at its processor time (per rendering),
its memory is limited (`RLIMIT_AS`), so is the prompt's length, and it can neither write files nor see the gateway's
environment (API keys). Compilation is inside the same limits, because jinja computes constants while it compiles.

Bounded: time, memory, output, and that the event loop never runs a line of a template. Not bounded: how long a chat
waits behind others that are slow within the limits; so short chats have one process and long ones another.

Called by `tokenizer.py`. The process starts with the first chat (or `warm`) and anew after it was killed; it ends with
the gateway, whose end closes its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from cohort.common.errors import ModelError, RequestError
from cohort.services.gateway.chat_template import ChatTemplate

_LENGTH = struct.Struct(">cQ")
_HELLO, _CHAT, _TEXT, _REFUSED, _BROKEN = b"H", b"C", b"T", b"R", b"B"
_EXIT_MEMORY = 70
_WAIT_FACTOR = 10.0
"""Wall-clock time granted per second of processor time: only a process that is stopped or starved needs more."""
_START_S = 5.0
_SHORT_BYTES = 8192
"""Of the messages as JSON."""
_OUTPUT_SHARE = 8
"""The prompt may have 1/8 of the memory in bytes: it exists several times while it is rendered and sent."""
_KEPT_ENVIRONMENT = ("PATH", "LANG", "TZ", "TZDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """`gateway.template_cpu_s` and `gateway.template_memory_bytes`."""

    cpu_s: float = 5.0
    memory_bytes: int = 512 << 20

    @property
    def output_bytes(self) -> int:
        return self.memory_bytes // _OUTPUT_SHARE


class _Ended(Exception):
    """The process is gone; its exit status, negative for a signal, None when it gave no answer in time."""

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status


class ChatRenderer:
    """A model's chat template: one process for short chats, one for long ones, so that the former never wait for the
    latter. Safe to use from threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], limits: TemplateLimits) -> None:
        self._short = _TemplateProcess(source, special_tokens, limits)
        self._long = _TemplateProcess(source, special_tokens, limits)

    def warm(self) -> None:
        """Start what the first chat needs. Raises `ModelError` when the template cannot be compiled."""
        self._short.warm()

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Blocks. Raises `RequestError`: the template's own refusal, or the limit that the messages went beyond."""
        data = _encoded(messages, add_generation_prompt, variables)
        return self._process_for(data).render(data)

    async def render_soon(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Like `render`, in a thread for this alone; a caller that is cancelled before its turn leaves the queue."""
        data = _encoded(messages, add_generation_prompt, variables)
        process = self._process_for(data)
        return await asyncio.get_running_loop().run_in_executor(process.executor, process.render, data)

    def _process_for(self, data: bytes) -> _TemplateProcess:
        return self._short if len(data) <= _SHORT_BYTES else self._long


class _TemplateProcess:
    """One rendering at a time; the process is started when it is wanted and not there."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], limits: TemplateLimits) -> None:
        self._hello = msgspec.json.encode(
            {
                "source": source,
                "special_tokens": dict(special_tokens),
                "cpu_s": limits.cpu_s,
                "memory_bytes": limits.memory_bytes,
            }
        )
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="chat-template")

    def warm(self) -> None:
        with self._lock:
            try:
                self._running()
            except _Ended as ended:
                raise ModelError(f"The model's chat template cannot be used: {self._why(ended)}") from None

    def render(self, data: bytes) -> str:
        with self._lock:
            try:
                kind, answer = self._ask(self._running(), _CHAT, data)
            except _Ended as ended:
                status = 503 if ended.status is None else 400
                raise RequestError(
                    f"The model's chat template was stopped: {self._why(ended)}.", status=status, param="messages"
                ) from None
            except ModelError as error:
                raise RequestError(str(error), param="messages") from error
        text = answer.decode()
        if kind == _REFUSED:
            raise RequestError(text, param="messages")
        return text

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        environment |= {name: value for name, value in os.environ.items() if name.startswith("LC_")}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )
        weakref.finalize(self, _end, process)
        self._process = process
        kind, answer = self._ask(process, _HELLO, self._hello, more_s=_START_S)
        if kind == _BROKEN:
            raise ModelError(f"The model's chat template cannot be compiled: {answer.decode()}")
        return process

    def _ask(
        self, process: subprocess.Popen[bytes], kind: bytes, data: bytes, more_s: float = 0.0
    ) -> tuple[bytes, bytes]:
        deadline_s = time.monotonic() + _WAIT_FACTOR * self._limits.cpu_s + more_s
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(_LENGTH.pack(kind, len(data)) + data)
            answered, size = _LENGTH.unpack(_read_until(process.stdout, _LENGTH.size, deadline_s))
            if size > self._limits.output_bytes:
                raise EOFError  # not what we run
            return answered, _read_until(process.stdout, size, deadline_s)
        except TimeoutError:
            _end(process)
            raise _Ended(None) from None
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise _Ended(process.wait(_START_S)) from None
            _end(process)
            raise _Ended(None) from None
        except BaseException:
            _end(process)  # the pipe is out of step
            raise

    def _why(self, ended: _Ended) -> str:
        match ended.status:
            case None:
                return "it gave no answer in time"
            case status if status == -signal.SIGPROF:
                return f"more than {self._limits.cpu_s:g} s of processor time (gateway.template_cpu_s)"
            case status if status in (_EXIT_MEMORY, -signal.SIGKILL, -signal.SIGSEGV):
                return f"more than {self._limits.memory_bytes} bytes of memory (gateway.template_memory_bytes)"
            case status:
                return f"its process ended with status {status}"


def _encoded(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]) -> bytes:
    chat = {"messages": messages, "add_generation_prompt": add_generation_prompt, "variables": variables}
    try:
        try:
            return msgspec.json.encode(chat)
        except OverflowError:  # an integer beyond 64 bits, which a template may print
            return json.dumps(chat).encode()
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RequestError(f"The messages cannot be given to the chat template: {error}", param="messages") from error


def _read_until(stream: BinaryIO | Any, count: int, deadline_s: float) -> bytes:
    """Exactly `count` bytes of an unbuffered pipe. Raises `EOFError`, `TimeoutError`."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    parts = bytearray()
    while len(parts) < count:
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            raise TimeoutError
        part = stream.read(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _end(process: subprocess.Popen[bytes]) -> None:
    """At once, leaving no zombie and no open pipe."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


# -- Inside the process ------------------------------------------------------------------------------------------


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the gateway's business; it closes our input
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    _, data = _receive(source)
    hello = json.loads(data)
    cpu_s, output_bytes = hello["cpu_s"], hello["memory_bytes"] // _OUTPUT_SHARE
    _limit(hello["memory_bytes"])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process, also inside a single long operation
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            template = ChatTemplate(hello["source"], hello["special_tokens"])
        except MemoryError:
            raise
        except Exception as error:  # a stranger's text can fail the compiler in any way
            _send(sink, _BROKEN, _short(f"{type(error).__name__}: {error}"))
            return 0
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(sink, _TEXT, b"")
        while True:
            _, data = _receive(source)
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            kind, answer = _rendered(template, data, output_bytes)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(sink, kind, answer)
    except EOFError:
        return 0
    except MemoryError:
        os._exit(_EXIT_MEMORY)  # nothing that needs memory
    except BrokenPipeError:
        os._exit(0)


def _limit(memory_bytes: int) -> None:
    """Never more than what the process has now and `memory_bytes`; no file, no core."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        now = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for what, most in ((resource.RLIMIT_AS, now + memory_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(what)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (limit, limit))


def _rendered(template: ChatTemplate, data: bytes, output_bytes: int) -> tuple[bytes, bytes]:
    try:
        chat = json.loads(data)
        text = template.render(
            chat["messages"], add_generation_prompt=chat["add_generation_prompt"], variables=chat["variables"]
        )
        answer = text.encode()
    except RequestError as error:
        return _REFUSED, _short(error.message)
    except (UnicodeEncodeError, RecursionError, ValueError) as error:
        return _REFUSED, _short(f"The model's chat template failed on the messages: {type(error).__name__}: {error}")
    if len(answer) > output_bytes:
        return _REFUSED, _short(
            f"The model's chat template made a prompt of {len(answer)} bytes; the most is {output_bytes}, an eighth of "
            "gateway.template_memory_bytes."
        )
    return _TEXT, answer


def _short(text: str) -> bytes:
    return text[:1000].encode("utf-8", "replace")


def _receive(source: BinaryIO) -> tuple[bytes, bytes]:
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    kind, size = _LENGTH.unpack(head)
    data = source.read(size)
    if len(data) < size:
        raise EOFError
    return kind, data


def _send(sink: BinaryIO, kind: bytes, data: bytes) -> None:
    sink.write(_LENGTH.pack(kind, len(data)))
    sink.write(data)
    sink.flush()


if __name__ == "__main__":
    sys.exit(main())
