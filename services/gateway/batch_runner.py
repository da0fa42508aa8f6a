"""Runs batches: checks the input, answers its lines, writes the files, whatever interrupts it.

    new or found at start ─▶ validate ─▶ lines, many at a time ─▶ write files ─▶ ended
                                │             │ cancel, expiry: what is in work is given up
                                └── failed    └── every result is stored before the next step

Called by `service.py` (run, until cancelled) and `batch_api.py` (submit, cancel). All state is in the store; this
holds only what is in work, so ending it at any moment, kill -9 included, loses the lines in work and nothing else. A
step that fails (a full disk, a broken database) is logged and tried again later, until it works.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NoReturn, Protocol

import structlog

from cohort.common.clock import Clock
from cohort.common.config import BatchConfig
from cohort.common.errors import RequestError
from cohort.common.metrics import MetricFactory
from cohort.services.gateway.batch_files import BatchFolder, ContentWriter
from cohort.services.gateway.batch_lines import InputReader, answered, line_id, not_run, read_body, refused
from cohort.services.gateway.batch_store import (
    BatchStore,
    FinishedLine,
    LineError,
    PendingLine,
    StoredBatch,
    StoredFile,
    StoreThread,
)
from cohort.services.gateway.batch_turns import Turns
from cohort.services.gateway.openai_api import LineAnswer

PAGE = 256  # lines read from the database at once
SWEEP_S = 60.0  # between two looks for what has expired
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
LEAST_BUSY_WAIT_S, LONGEST_BUSY_WAIT_S = 0.2, 10.0
MAX_TRIES = 5  # of a line whose workers were lost
STATUSES = ("validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired")


class AnswerLine(Protocol):
    async def __call__(self, data: bytes, *, chat: bool, line_id: str, owner: str) -> LineAnswer: ...


class BatchMetrics:
    def __init__(self, make: MetricFactory) -> None:
        self.batches = make.gauge("batches", "Batches in the store, by status", ("status",))
        self.lines = make.counter(
            "batch_lines", "Lines of batches that ended: completed, failed, expired, cancelled", ("outcome",)
        )
        self.in_work = make.gauge("batch_lines_in_work", "Lines of batches that are being answered now")
        self.line_retries = make.counter("batch_line_retries", "Lines tried again: busy or lost", ("reason",))


@dataclass(slots=True)
class _Job:
    """A batch in work. `cancelled` ends its lines."""

    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class BatchRunner:
    def __init__(
        self,
        *,
        config: BatchConfig,
        folder: BatchFolder,
        store: StoreThread,
        answer: AnswerLine,
        turns: Turns,
        max_line_bytes: int,
        clock: Clock,
        metrics: BatchMetrics,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._config = config
        self._folder = folder
        self._store = store
        self._answer = answer
        self._turns = turns
        self._max_line_bytes = max_line_bytes
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._jobs: dict[str, _Job] = {}
        self._new: asyncio.Queue[str] = asyncio.Queue()
        for status in STATUSES:
            metrics.batches(status).set(0)

    def submit(self, batch_id: str) -> None:
        """A batch was stored as validating."""
        self._new.put_nowait(batch_id)

    def cancel(self, batch_id: str) -> None:
        """A batch was stored as cancelling."""
        if (job := self._jobs.get(batch_id)) is not None:
            job.cancelled.set()

    async def run(self) -> NoReturn:
        """Until cancelled; what is in work then stays pending in the store."""
        await self._until_it_works("finding unfinished batches", self._find)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sweep(), name="sweep")
            while True:
                batch_id = await self._new.get()
                if batch_id not in self._jobs:
                    self._jobs[batch_id] = _Job()
                    tasks.create_task(self._job(batch_id), name=batch_id)
        raise AssertionError("unreachable: the loop above ends by cancellation only")

    async def _find(self) -> None:
        found = await self._store.run(lambda store: store.unfinished())
        await self.count()
        for batch_id in found:
            self.submit(batch_id)
        if found:
            self._log.info("batches go on", batches=len(found))

    async def count(self) -> None:
        """Bring the gauges up to date."""
        counts = await self._store.run(lambda store: store.counts())
        for status in STATUSES:
            self._metrics.batches(status).set(counts.get(status, 0))

    # -- One batch -------------------------------------------------------------------------------------------------

    async def _job(self, batch_id: str) -> None:
        job = self._jobs[batch_id]
        with structlog.contextvars.bound_contextvars(batch_id=batch_id):
            await self._until_it_works("batch", lambda: self._advance(batch_id, job))
        del self._jobs[batch_id]

    async def _until_it_works(self, what: str, step: Callable[[], Awaitable[None]]) -> None:
        wait_s = FIRST_RETRY_S
        while True:
            try:
                return await step()
            except (OSError, sqlite3.Error) as error:
                self._log.error(f"{what} cannot go on", reason=str(error), retry_after_s=wait_s)
            except Exception:
                self._log.exception(f"{what} failed unexpectedly", retry_after_s=wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_RETRY_S)

    async def _advance(self, batch_id: str, job: _Job) -> None:
        """From wherever the batch is to its end."""
        batch = await self._load(batch_id)
        if batch is not None and batch.status == "validating":
            await self._validate(batch, job)
            batch = await self._load(batch_id)
        if batch is not None and batch.status == "in_progress":
            await self._run_lines(batch, job)
            batch = await self._load(batch_id)
        if batch is not None and batch.unfinished:
            await self._finalize(batch)
        await self.count()

    async def _load(self, batch_id: str) -> StoredBatch | None:
        batch = await self._store.run(lambda store: store.batch(batch_id))
        await self.count()
        return batch

    async def _validate(self, batch: StoredBatch, job: _Job) -> None:
        path = self._folder.content(batch.input_file_id)
        try:
            reader = await asyncio.to_thread(
                InputReader, path, batch.endpoint, max_lines=self._config.max_lines, max_line_bytes=self._max_line_bytes
            )
        except FileNotFoundError:
            gone = LineError("invalid_input_file", "The content of the input file is gone.")
            await self._store.run(lambda store: store.fail(batch.id, self._clock.wall_s(), [gone]))
            self._log.error("batch refused: the content of its input file is gone", file_id=batch.input_file_id)
            return
        try:
            total = 0
            while (found := await asyncio.to_thread(reader.next)) and not job.cancelled.is_set():
                await self._store.run(partial(_add_lines, batch.id, found, not total))
                total += len(found)
        finally:
            reader.close()
        now_s = self._clock.wall_s()
        if reader.errors:
            await self._store.run(lambda store: store.fail(batch.id, now_s, reader.errors))
            self._log.warning("batch refused", errors=len(reader.errors), first=reader.errors[0].message)
        else:
            await self._store.run(lambda store: store.begin(batch.id, now_s, model=reader.model))
            self._log.info("batch begins", lines=total, endpoint=batch.endpoint)

    async def _run_lines(self, batch: StoredBatch, job: _Job) -> None:
        """Until every line has a result, or the batch is cancelled or expires."""
        left_s = batch.expires_at - self._clock.wall_s()
        lines = asyncio.create_task(self._all_lines(batch), name=f"{batch.id} lines")
        cancelled = asyncio.create_task(job.cancelled.wait())
        try:
            await asyncio.wait((lines, cancelled), timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
            if lines.done():
                lines.result()
        finally:
            for task in (lines, cancelled):
                task.cancel()
            await asyncio.wait((lines, cancelled))

    async def _all_lines(self, batch: StoredBatch) -> None:
        after = 0
        async with asyncio.TaskGroup() as tasks:
            while page := await self._pending(batch.id, after):
                for line in page:
                    await self._turns.take()
                    self._metrics.in_work().set(self._turns.taken)
                    task = tasks.create_task(self._line(batch, line))
                    task.add_done_callback(self._give_back)
                after = page[-1].number

    def _give_back(self, _: asyncio.Task[None]) -> None:
        self._turns.give_back()
        self._metrics.in_work().set(self._turns.taken)

    async def _pending(self, batch_id: str, after: int) -> list[PendingLine]:
        return await self._store.run(lambda store: store.pending(batch_id, after=after, limit=PAGE))

    # -- One line --------------------------------------------------------------------------------------------------

    async def _line(self, batch: StoredBatch, line: PendingLine) -> None:
        try:
            answer = await self._answer_line(batch, line)
        except RequestError as error:
            self._log.debug("line failed", line=line.number, status=error.status, reason=error.message)
            done = FinishedLine(line.number, False, refused(batch.id, line, error))
        else:
            usage = answer.usage
            done = FinishedLine(
                line.number,
                True,
                answered(batch.id, line, answer.request_id, answer.body),
                input_tokens=usage.prompt_tokens,
                cached_tokens=usage.prompt_tokens_details.cached_tokens,
                output_tokens=usage.completion_tokens,
            )
        # An answer that is there must be kept even when the batch is cancelled this very moment.
        if await asyncio.shield(self._store.run(lambda store: store.finish_line(batch.id, done))):
            self._metrics.lines("completed" if done.succeeded else "failed").inc()

    async def _answer_line(self, batch: StoredBatch, line: PendingLine) -> LineAnswer:
        """Tried again while the server is busy, and a few times when its workers were lost. Raises `RequestError`."""
        path = self._folder.content(batch.input_file_id)
        body = await asyncio.to_thread(read_body, path, line)
        chat = batch.endpoint == "/v1/chat/completions"
        lost = 0
        while True:
            try:
                named = line_id(batch.id, line.number)
                return await self._answer(body, chat=chat, line_id=named, owner=batch.owner)
            except RequestError as error:
                lost += error.status == 503
                if error.status not in (429, 503) or lost >= MAX_TRIES:
                    raise
                self._metrics.line_retries("busy" if error.status == 429 else "lost").inc()
                wait_s = error.retry_after_s or 0.0
            except Exception:
                self._log.exception("line failed unexpectedly", line=line.number)
                raise RequestError(
                    "The server failed to answer this request.", status=500, type_="server_error"
                ) from None
            await asyncio.sleep(min(LONGEST_BUSY_WAIT_S, max(LEAST_BUSY_WAIT_S, wait_s)))

    # -- The end ---------------------------------------------------------------------------------------------------

    async def _finalize(self, batch: StoredBatch) -> None:
        """Write what there is, once: repeated after an interruption, it writes the same files again."""
        await self._store.run(lambda store: store.begin_finalizing(batch.id, self._clock.wall_s()))
        await self.count()
        status = await self._outcome(batch)
        output = await self._write_file(batch, succeeded=True, status=status)
        errors = await self._write_file(batch, succeeded=False, status=status)
        now_s = self._clock.wall_s()
        await self._store.run(lambda store: store.end(batch.id, now_s, status, output=output, errors=errors))
        ended = await self._load(batch.id)
        if ended is not None:
            self._log.info(
                "batch ended",
                status=status,
                lines=ended.total,
                completed=ended.completed,
                failed=ended.failed,
                seconds=round(now_s - ended.created_at, 1),
            )

    async def _outcome(self, batch: StoredBatch) -> Literal["completed", "expired", "cancelled"]:
        current = await self._load(batch.id)
        if current is not None and current.cancelling_at is not None:
            return "cancelled"
        return "expired" if await self._pending(batch.id, 0) else "completed"

    async def _write_file(
        self, batch: StoredBatch, *, succeeded: bool, status: Literal["completed", "expired", "cancelled"]
    ) -> StoredFile | None:
        """None when there is nothing to write. Lines stand in the order of the input; those never run come last."""
        kind = "output" if succeeded else "error"
        file_id = f"file-{batch.id.removeprefix('batch_')}-{kind}"
        with await asyncio.to_thread(self._folder.write, file_id) as writer:
            after = 0
            while results := await self._results(batch.id, succeeded, after):
                await asyncio.to_thread(writer.write, b"".join(result + b"\n" for _, result in results))
                after = results[-1][0]
            if not succeeded and status != "completed" and batch.in_progress_at is not None:
                await self._write_not_run(writer, batch.id, status)
            if not writer.bytes:
                return None
            await asyncio.to_thread(writer.keep)
        created_at = int(self._clock.wall_s())
        return StoredFile(
            0,
            file_id,
            batch.owner,
            "batch_output",
            f"{batch.id}_{kind}.jsonl",
            writer.bytes,
            created_at,
            created_at + batch.output_retention_s,
        )

    async def _results(self, batch_id: str, succeeded: bool, after: int) -> list[tuple[int, bytes]]:
        return await self._store.run(
            lambda store: store.results(batch_id, succeeded=succeeded, after=after, limit=PAGE)
        )

    async def _write_not_run(
        self, writer: ContentWriter, batch_id: str, reason: Literal["expired", "cancelled"]
    ) -> None:
        after = 0
        while page := await self._pending(batch_id, after):
            lines = b"".join(not_run(batch_id, line, reason) + b"\n" for line in page)
            await asyncio.to_thread(writer.write, lines)
            self._metrics.lines(reason).inc(len(page))
            after = page[-1].number

    # -- Retention -------------------------------------------------------------------------------------------------

    async def _sweep(self) -> NoReturn:
        while True:
            await self._until_it_works("deleting what has expired", self.sweep)
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> None:
        """Delete what has expired, rows first: a content without a row is removed at the next start at the latest."""
        now_s = self._clock.wall_s()
        gone = await self._store.run(lambda store: store.forget(now_s, self._config.retention_s))
        if gone:
            await asyncio.to_thread(self._folder.remove, gone)
            self._log.info("expired files deleted", files=len(gone))
            await self.count()


def _add_lines(batch_id: str, lines: list[PendingLine], first: bool, store: BatchStore) -> None:
    store.add_lines(batch_id, lines, first=first)
