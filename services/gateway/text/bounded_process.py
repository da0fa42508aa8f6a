"""A process for work that a stranger's text decides the cost of: limits bound it, its death is an error.

    gateway ──frame: a question──▶ process ──frame: the answer, or a refusal──▶ gateway

The kernel kills the process at its processor time (per question); memory (`RLIMIT_AS`) and the answer's length are
limited, and it can neither write files nor see the gateway's environment (API keys). It starts with the first question
(or `warm`), again after a kill, and ends with the gateway.

Questions wait in a `QuestionQueue`, on the event loop: bounded by key, in turn of the keys, small ones first.

    turn      the key whose questions have had the fewest bytes goes next (`FairQueue`); a key that is new goes at once
    rank      within a key by size, and by arrival: a large one is passed by a bounded number of later ones
    beside    where the user allows it, a few are under way together, as long as answers come quickly
    bound     questions that wait of one key, and the time that a request waits; beyond: 429 with Retry-After
    together  requests of a key with the same question have one place, which is free when all of them have gone

Used by `template_process.py` and `grammar_process.py`, which have the work; both sides of the pipe are here.
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
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import msgspec

from cohort.common.errors import ModelError, RequestError, busy
from cohort.common.policies.fair_queue import FairQueue
from cohort.common.types import RequestId
from cohort.services.gateway import bounds

ANSWER, REFUSED = b"T", b"R"
_HELLO, _QUESTION, _BROKEN = b"H", b"C", b"B"
_LENGTH = struct.Struct(">cQ")
_EXIT_MEMORY = 70
_WAIT_FACTOR = 10.0
"""Wall-clock time granted per second of processor time: only a process that is stopped or starved needs more."""
_START_S = 5.0
_OUTPUT_SHARE = 8
"""An answer may have 1/8 of the memory in bytes: it exists several times while it is made and sent."""
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
"""Signals that no limit of ours sends: somebody else does, or the system ran out of memory."""
_PASSED_ENVIRONMENT = ("PATH", "LANG", "TZ", "TZDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")

_AGE_BYTES = 1024
"""Size by which a question must be smaller than another of its key, for each that arrived in between, to go first: one
of 64 KiB is passed by 64."""
_RETRY_AFTER_S = 1.0
_QUICK_S = 0.1
"""Time of an answer within which further questions are begun beside the one under way: the process does not wait for
the event loop then, and a busy loop takes several answers in one turn. After a slower one they go one at a time, so
that another key waits for one only."""

Answer = tuple[bytes, bytes]
"""Kind of answer (`ANSWER`, `REFUSED`), and what it is."""
Work = Callable[[bytes], Answer]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one question; `start_cpu_s` is for the start-up before the first."""

    cpu_s: float
    memory_bytes: int
    start_cpu_s: float

    @property
    def output_bytes(self) -> int:
        return self.memory_bytes // _OUTPUT_SHARE


class Ended(Exception):
    """End of the process: its exit status (negative for a signal; None: no answer in time), and why, with the limit."""

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status
        self.why = ""


class BoundedProcess:
    """Process for one question at a time, started on demand. Safe to use from threads."""

    def __init__(self, module: str, about: Mapping[str, Any], limits: Limits, broken: str) -> None:
        """`module` runs `serve` with the parameters `about`; `broken`: the error's text when it cannot start."""
        self._module = module
        self._broken = broken
        self._limits = limits
        self._setup = msgspec.json.encode(
            {
                "about": about,
                "cpu_s": limits.cpu_s,
                "start_cpu_s": limits.start_cpu_s,
                "memory_bytes": limits.memory_bytes,
            }
        )
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: weakref.finalize[[subprocess.Popen[bytes]], BoundedProcess] | None = None
        """Finalizer of the process: with this object, or when another process takes its place."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=module.rpartition(".")[2])

    def warm(self) -> None:
        """Start it. Raises `ModelError` when it cannot begin."""
        with self._lock:
            try:
                self._running()
            except Ended as ended:
                raise ModelError(f"{self._broken}: {self._why(ended)}") from None

    def call(self, question: bytes) -> Answer:
        """Return the answer; blocks. Raises `Ended`, or `ModelError` if the process cannot start. After a kill from
        outside the question is asked once more."""
        with self._lock:
            try:
                try:
                    return self._call(self._running(), _QUESTION, question, self._limits.cpu_s)
                except Ended as ended:
                    if ended.status not in _FROM_OUTSIDE:
                        raise
                return self._call(self._running(), _QUESTION, question, self._limits.cpu_s)
            except Ended as ended:
                ended.why = self._why(ended)
                raise

    def begin(self, question: bytes) -> asyncio.Task[Answer]:
        """Begin `call` in a thread. A task: it ends with its event loop, which may end before the process answers."""
        return asyncio.get_running_loop().create_task(self._soon(question))

    async def _soon(self, question: bytes) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.call, question)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._ending is not None:
            self._ending()
        environment = {name: os.environ[name] for name in _PASSED_ENVIRONMENT if name in os.environ}
        environment |= {name: value for name, value in os.environ.items() if name.startswith("LC_")}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._ending = weakref.finalize(self, _end, process)
        self._process = process
        kind, answer = self._call(process, _HELLO, self._setup, self._limits.start_cpu_s, more_s=_START_S)
        if kind == _BROKEN:
            raise ModelError(f"{self._broken}: {answer.decode()}")
        return process

    def _call(
        self, process: subprocess.Popen[bytes], kind: bytes, data: bytes, cpu_s: float, more_s: float = 0.0
    ) -> tuple[bytes, bytes]:
        deadline_s = time.monotonic() + max(1.0, _WAIT_FACTOR * cpu_s) + more_s
        try:
            assert process.stdin is not None and process.stdout is not None
            _write_until(process.stdin, _LENGTH.pack(kind, len(data)) + data, deadline_s)
            answered, size = _LENGTH.unpack(_read_until(process.stdout, _LENGTH.size, deadline_s))
            if size > self._limits.output_bytes:
                raise EOFError  # not what we run
            return answered, _read_until(process.stdout, size, deadline_s)
        except TimeoutError:
            _end(process)
            raise Ended(None) from None
        except (EOFError, OSError):
            status = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_START_S)
            _end(process)
            raise Ended(status) from None
        except BaseException:
            _end(process)  # the pipe is out of step
            raise

    def _why(self, ended: Ended) -> str:
        limits = self._limits
        match ended.status:
            case None:
                return "it gave no answer in time"
            case status if status == -signal.SIGPROF:
                return f"more than {limits.cpu_s:g} s of processor time"
            case status if status in (_EXIT_MEMORY, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT):
                return f"more than {limits.memory_bytes} bytes of memory"
            case status:
                return f"its process ended with status {status}"


# -- Turns of the questions ----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Place:
    owner: str
    question: bytes
    name: RequestId
    answer: asyncio.Future[Answer]
    requests: int = 0


class QuestionQueue:
    def __init__(
        self, ask: Callable[[bytes], asyncio.Future[Answer]], what: str, most: Callable[[], int], beside: int = 0
    ) -> None:
        """`ask` begins one question; it is called again when that has ended, and for `beside` more while answers come
        within `_QUICK_S`. `what` the questions are, for messages; `most`: of one key that wait."""
        self._ask = ask
        self._what = what
        self._most = most
        self._beside = beside
        self._fair = FairQueue()
        self._places: dict[tuple[str, bytes], _Place] = {}
        """Questions that wait, and those under way."""
        self._waiting: dict[RequestId, _Place] = {}
        self._waiting_of: Counter[str] = Counter()
        self._arrived = 0
        self._under_way = 0
        self._is_quick = False
        self._since_s = 0.0
        """Time at which the last question ended, or the first of those under way was begun."""

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, owner: str, question: bytes) -> Answer:
        """Return the answer in its turn. Raises a 429 `RequestError`, or what `ask` raised."""
        place = self._places.get((owner, question)) or self._add(owner, question)
        place.requests += 1
        try:
            async with asyncio.timeout(wait_s := bounds.BOUNDS.turn_wait_s):
                return await asyncio.shield(place.answer)
        except TimeoutError:
            raise self._busy(f"this request's had no answer within {wait_s:g} s") from None
        finally:
            place.requests -= 1
            if not place.requests and self._fair.remove(place.name):
                self._leave(place)
                del self._places[owner, question]

    def _add(self, owner: str, question: bytes) -> _Place:
        if (count := self._waiting_of[owner]) >= (most := self._most()):
            raise self._busy(f"{count} of this client's wait, and at most {most} may")
        self._arrived += 1
        name, size = str(self._arrived), max(1, len(question))
        place = _Place(owner, question, name, asyncio.get_running_loop().create_future())
        self._places[owner, question] = self._waiting[name] = place
        self._waiting_of[owner] += 1
        self._fair.add(owner, name, rank=size + self._arrived * _AGE_BYTES, cost=size)
        self._begin()
        return place

    def _leave(self, place: _Place) -> None:
        del self._waiting[place.name]
        self._waiting_of[place.owner] -= 1
        assert self._waiting_of[place.owner] >= 0, f"{self._waiting_of} {self._what} wait"
        if not self._waiting_of[place.owner]:
            del self._waiting_of[place.owner]

    def _begin(self) -> None:
        if not self._under_way:
            self._since_s = time.monotonic()
        while self._under_way <= self._is_quick * self._beside and (name := self._fair.next()) is not None:
            place = self._waiting[name]
            self._leave(place)
            self._under_way += 1
            self._ask(place.question).add_done_callback(partial(self._end, place))

    def _end(self, place: _Place, asked: asyncio.Future[Answer]) -> None:
        assert self._under_way and self._places[place.owner, place.question] is place, f"{place.name} ends twice"
        now_s = time.monotonic()
        self._is_quick, self._since_s = now_s - self._since_s < _QUICK_S, now_s
        self._under_way -= 1
        del self._places[place.owner, place.question]
        if asked.cancelled():
            place.answer.cancel()
        elif error := asked.exception():
            if place.requests:  # nobody else would take it
                place.answer.set_exception(error)
        else:
            place.answer.set_result(asked.result())
        self._begin()

    def _busy(self, why: str) -> RequestError:
        return busy(f"The server is busy with {self._what}: {why}. Please retry later.", _RETRY_AFTER_S)


# -- The pipe ------------------------------------------------------------------------------------------------------


def _write_until(stream: BinaryIO | Any, data: bytes, deadline_s: float) -> None:
    """Write all of `data` to an unbuffered pipe that does not block. Raises `TimeoutError`."""
    poll = select.poll()
    poll.register(stream, select.POLLOUT)
    unsent = memoryview(data)
    while unsent:
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            raise TimeoutError
        unsent = unsent[stream.write(unsent) or 0 :]


def _read_until(stream: BinaryIO | Any, count: int, deadline_s: float) -> bytes:
    """Read exactly `count` bytes of an unbuffered pipe. Raises `EOFError`, `TimeoutError`."""
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
    """Kill the process, leaving no zombie and no open pipe."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


# -- Inside the process ------------------------------------------------------------------------------------------


def serve(begin: Callable[[Mapping[str, Any], int], Work]) -> int:
    """Run the process. `begin` gets its parameters and the answers' byte limit, and returns the work; its exception's
    text is sent as the reason why it cannot."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the gateway's business; it closes our input
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    _, data = _receive(source)
    hello = json.loads(data)
    _limit(hello["memory_bytes"])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process, also inside a single long operation
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, hello["start_cpu_s"])
            work = begin(hello["about"], hello["memory_bytes"] // _OUTPUT_SHARE)
        except MemoryError:
            raise
        except Exception as error:  # a stranger's text can fail in any way
            _send(sink, _BROKEN, short(f"{type(error).__name__}: {error}"))
            return 0
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(sink, ANSWER, b"")
        while True:
            _, data = _receive(source)
            signal.setitimer(signal.ITIMER_PROF, hello["cpu_s"])
            kind, answer = work(data)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(sink, kind, answer)
    except EOFError:
        return 0
    except MemoryError:
        os._exit(_EXIT_MEMORY)  # nothing that needs memory
    except BrokenPipeError:
        os._exit(0)


def short(text: str) -> bytes:
    """Encode a refusal's text, shortened."""
    return text[:1000].encode("utf-8", "replace")


def _limit(memory_bytes: int) -> None:
    """Limit memory to what the process has now and `memory_bytes`; allow no file, no core."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        now = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for what, most in ((resource.RLIMIT_AS, now + memory_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(what)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (limit, limit))


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
