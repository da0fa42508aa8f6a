"""A process for work that a stranger's text decides the cost of: limits bound it, its death is an error.

    gateway ──frames: questions──▶ process ──a frame for each: the answer, a refusal, or "not begun"──▶ gateway

The kernel kills the process at its processor time (per question); memory (`RLIMIT_AS`) and the answer's length are
limited, and it can neither write files nor see the gateway's environment (API keys). It starts with the first question
(or `warm`), again after a kill, and ends with the gateway.

Questions wait in a `QuestionQueue`, on the event loop: bounded by key, in turn of the keys, small ones first.

    turn      the key whose questions have had the fewest bytes goes next (`FairQueue`); a key that is new goes at once
    rank      within a key by size, and by arrival: a large one is passed by a bounded number of later ones
    together  where the user allows it, several are asked in one message; what the process has not begun after
              `_TOGETHER_S` waits again, so that another key waits for one slow question, whatever came with it
    bound     questions that wait of one key, and the time that a request waits; beyond: 429 with Retry-After
    same      requests of a key with the same question have one place, which is free when all of them have gone

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from cohort.common.errors import ModelError, RequestError, busy
from cohort.common.policies.fair_queue import FairQueue
from cohort.common.types import RequestId
from cohort.services.gateway import bounds

ANSWER, REFUSED = b"T", b"R"
_HELLO, _QUESTION, _ANOTHER, _BROKEN, _NOT_BEGUN = b"H", b"C", b"A", b"B", b"N"
"""Kinds of frames. `_ANOTHER`: a question with which further ones come; `_QUESTION` is the last of them."""
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
_TOGETHER_S = 0.01
"""Time within which further questions of one message are begun."""

Answer = tuple[bytes, bytes]
"""Kind of answer (`ANSWER`, `REFUSED`), and what it is."""
Work = Callable[[bytes], Answer]
Answers = list["Answer | Ended | None"]
"""Answers to questions that were asked together; of the one that ended the process, why; None for one not begun."""


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
        """Return the answer; blocks. Raises `Ended`, or `ModelError` if the process cannot start."""
        [answer] = self.call_together([question])
        if isinstance(answer, Ended):
            raise answer
        assert answer is not None, "the first question is always begun"
        return answer

    def call_together(self, questions: Sequence[bytes]) -> Answers:
        """Ask in this order; blocks. After a kill from outside the question is asked once more. Raises `ModelError`."""
        answers: Answers = []
        again = True
        with self._lock:
            while len(answers) < len(questions):
                *others, last = questions[len(answers) :]
                frames = b"".join([*(_framed(_ANOTHER, each) for each in others), _framed(_QUESTION, last)])
                try:
                    exchanged = self._exchanged(self._running(), frames, len(others) + 1, self._limits.cpu_s)
                    for kind, answer in exchanged:
                        answers.append(None if kind == _NOT_BEGUN else (kind, answer))
                except Ended as ended:
                    if again and ended.status in _FROM_OUTSIDE:
                        again = False
                        continue
                    ended.why = self._why(ended)
                    answers += [ended, *[None] * (len(questions) - len(answers) - 1)]
        return answers

    def begin(self, questions: Sequence[bytes]) -> asyncio.Task[Answers]:
        """Begin `call_together` in a thread. A task: it ends with its event loop, which may end before the process
        answers."""
        return asyncio.get_running_loop().create_task(self._soon(questions))

    async def _soon(self, questions: Sequence[bytes]) -> Answers:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.call_together, questions)

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
        frame = _framed(_HELLO, self._setup)
        [(kind, answer)] = self._exchanged(process, frame, 1, self._limits.start_cpu_s, more_s=_START_S)
        if kind == _BROKEN:
            raise ModelError(f"{self._broken}: {answer.decode()}")
        return process

    def _exchanged(
        self, process: subprocess.Popen[bytes], data: bytes, count: int, cpu_s: float, more_s: float = 0.0
    ) -> Iterator[tuple[bytes, bytes]]:
        """Send frames and yield as many as are to come, each within a time of its own."""
        try:
            assert process.stdin is not None and process.stdout is not None
            answer_s = max(1.0, _WAIT_FACTOR * cpu_s) + more_s
            _write_until(process.stdin, data, time.monotonic() + answer_s)
            received = bytearray()
            for _ in range(count):
                deadline_s = time.monotonic() + answer_s
                _read_until(process.stdout, received, _LENGTH.size, deadline_s)
                kind, size = _LENGTH.unpack_from(received)
                if size > self._limits.output_bytes:
                    raise EOFError  # not what we run
                end = _LENGTH.size + size
                _read_until(process.stdout, received, end, deadline_s)
                yield kind, bytes(received[_LENGTH.size : end])
                del received[:end]
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
        self,
        ask: Callable[[Sequence[bytes]], asyncio.Future[Answers]],
        what: str,
        most: Callable[[], int],
        together: int = 1,
    ) -> None:
        """`ask` begins up to `together` questions; it is called again when those have ended. `what` the questions are,
        for messages; `most`: of one key that wait."""
        self._ask = ask
        self._what = what
        self._most = most
        self._together = together
        self._fair = FairQueue()
        self._places: dict[tuple[str, bytes], _Place] = {}
        """Questions that wait, and those under way."""
        self._waiting: dict[RequestId, _Place] = {}
        self._waiting_of: Counter[str] = Counter()
        self._arrived = 0
        self._under_way: Sequence[_Place] = ()

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
            if not place.requests and place.name in self._waiting:
                self._fair.remove(place.name)
                self._leave(place)
                del self._places[owner, question]

    def _add(self, owner: str, question: bytes) -> _Place:
        if (count := self._waiting_of[owner]) >= (most := self._most()):
            raise self._busy(f"{count} of this client's wait, and at most {most} may")
        self._arrived += 1
        name, rank = str(self._arrived), len(question) + self._arrived * _AGE_BYTES
        place = _Place(owner, question, name, asyncio.get_running_loop().create_future())
        self._places[owner, question] = place
        self._fair.add(owner, name, rank=rank, cost=max(1, len(question)))
        self._wait(place)
        self._begin()
        return place

    def _wait(self, place: _Place) -> None:
        self._waiting[place.name] = place
        self._waiting_of[place.owner] += 1

    def _leave(self, place: _Place) -> None:
        del self._waiting[place.name]
        self._waiting_of[place.owner] -= 1
        assert self._waiting_of[place.owner] >= 0, f"{self._waiting_of} {self._what} wait"
        if not self._waiting_of[place.owner]:
            del self._waiting_of[place.owner]

    def _begin(self) -> None:
        if self._under_way or not (names := self._fair.first(self._together)):
            return
        self._under_way = places = [self._waiting[name] for name in names]
        for place in places:
            self._leave(place)
        self._ask([each.question for each in places]).add_done_callback(self._end)

    def _end(self, asked: asyncio.Future[Answers]) -> None:
        places, self._under_way = self._under_way, ()
        assert places, "nothing was asked"
        error = asyncio.CancelledError() if asked.cancelled() else asked.exception()
        answers = asked.result() if error is None else [error] * len(places)
        for place, answer in zip(places, answers, strict=True):
            if answer is None and place.requests:
                self._wait(place)
                continue
            del self._places[place.owner, place.question]
            if answer is None:
                self._fair.remove(place.name)
                continue
            self._fair.take(place.name)  # whether its client is there or not
            if not isinstance(answer, BaseException):
                place.answer.set_result(answer)
            elif place.requests:  # nobody else would take it
                place.answer.set_exception(answer)
        self._begin()

    def _busy(self, why: str) -> RequestError:
        return busy(f"The server is busy with {self._what}: {why}. Please retry later.", _RETRY_AFTER_S)


# -- The pipe ------------------------------------------------------------------------------------------------------


def _framed(kind: bytes, data: bytes) -> bytes:
    return _LENGTH.pack(kind, len(data)) + data


def _write_until(stream: BinaryIO | Any, data: bytes, deadline_s: float) -> None:
    """Write all of `data` to an unbuffered pipe that does not block. Raises `TimeoutError`."""
    poll = select.poll()
    poll.register(stream, select.POLLOUT)
    unsent = memoryview(data)
    while unsent:
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            raise TimeoutError
        unsent = unsent[stream.write(unsent) or 0 :]


def _read_until(stream: BinaryIO | Any, received: bytearray, count: int, deadline_s: float) -> None:
    """Read what an unbuffered pipe has until `count` bytes are received. Raises `EOFError`, `TimeoutError`."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    while len(received) < count:
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            raise TimeoutError
        part = stream.read(1 << 20)
        if not part:
            raise EOFError
        received += part


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
            questions, kind = list[bytes](), _ANOTHER
            while kind == _ANOTHER:
                kind, data = _receive(source)
                questions.append(data)
            ends_s = time.monotonic() + _TOGETHER_S
            for place, question in enumerate(questions):
                if place and time.monotonic() > ends_s:
                    _send(sink, _NOT_BEGUN, b"")
                    continue
                signal.setitimer(signal.ITIMER_PROF, hello["cpu_s"])
                kind, answer = work(question)
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
