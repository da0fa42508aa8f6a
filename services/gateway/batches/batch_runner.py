"""Runs batches: checks the input, answers its lines, writes the files, whatever interrupts it.

    new or found at start ─▶ validate ─▶ lines, many at a time ─▶ write files ─▶ ended
                                │             │ cancel, expiry: lines in work are given up
                                └── failed,   └── every result is stored before the next step
                                    expired

Called by `service.py` (run) and `batch_api.py` (submit, cancel). All state is in the store; a kill loses the lines in
work and nothing else.

Every batch ends. A step that the disk refuses is retried until it works or the batch expires. If its output cannot be
written, the batch fails after `bounds.BOUNDS.output_s`, with the disk's reason; its results stay in the store, and the
next start continues. (If the disk refuses that state too, the batch stays as it is.) Any other failure is a defect:
after `MAX_FAILURES` tries the batch fails, with its results. Once in work, a batch's time is elapsed time: no jump of
the clock ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NoReturn

import structlog

from cohort.common.clock import Clock
from cohort.common.errors import RequestError
from cohort.common.process.metrics import MetricFactory
from cohort.common.sqlite_file import disk_refuses
from cohort.services.gateway import bounds
from cohort.services.gateway.batches.batch_files import BatchFolder, ContentWriter
from cohort.services.gateway.batches.batch_lines import (
    MAX_RESULT_BYTES,
    AnswerLine,
    InputReader,
    LineAnswer,
    NotRun,
    answered,
    line_id,
    not_run,
    read_body,
    refused,
)
from cohort.services.gateway.batches.batch_quota import Quota
from cohort.services.gateway.batches.batch_records import FinishedLine, LineError, PendingLine, StoredBatch, StoredFile
from cohort.services.gateway.batches.batch_store import BatchStore, StoreThread
from cohort.services.gateway.batches.batch_sweeps import SweepGuard
from cohort.services.gateway.batches.batch_turns import Turns
from cohort.services.gateway.generation.delta import Caller
from cohort.services.gateway.keys.key_budget import KeyLimited

# Further than any priority a client may name: batch work never overtakes a request that a client waits for.
BATCH_PRIORITY = 2**32
PAGE = 256  # lines read from the database at once
PAGE_BYTES = 1 << 23  # of results in memory at once, and one more result
FOLLOW_S = 0.5  # between two looks at what other gateways of the port were told, and whether their runner has ended
SWEEP_S = 60.0  # between two looks for what has expired
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
LEAST_BUSY_WAIT_S, LONGEST_BUSY_WAIT_S = 0.2, 10.0
STORAGE_WAIT_S = 10.0  # between two looks whether there is storage for further results
MAX_TRIES = 5  # of a line whose workers were lost
MAX_FAILURES = 3  # tries of a batch that ends in a defect of this program
NOTE_SWEEP_S = 600.0  # the time of a sweep is written down for the next start at most so often
INTERNAL_ERROR = LineError("internal_error", "The server failed to run this batch.")
Outcome = Literal["completed", "expired", "cancelled", "failed"]
STATUSES = ("validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired")


class BatchMetrics:
    def __init__(self, make: MetricFactory) -> None:
        self.batches = make.gauge("batches", "Batches in the store, by status", ("status",))
        self.lines = make.counter(
            "batch_lines", "Lines of batches that ended: completed, failed, expired, cancelled", ("outcome",)
        )
        self.in_work = make.gauge("batch_lines_in_work", "Lines of batches that are being answered now")
        self.line_retries = make.counter(
            "batch_line_retries",
            "Lines that had to wait: busy, lost, key_limit, storage (files and results fill it)",
            ("reason",),
        )
        self.usable = make.gauge("batch_store_usable", "1 while files and batches are served, 0 where they cannot be")


@dataclass(slots=True)
class _Job:
    """Batch in work. `cancelled` ends its lines, as does `ends_at_s` of the monotonic clock."""

    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    ends_at_s: float | None = None
    failures: int = 0
    writing_since_s: float | None = None
    """Monotonic time at which this process began to write its output."""


@dataclass(frozen=True, slots=True)
class BatchContext:
    """Parts that the runner and the API of batches share. `retention_s`: of an output file."""

    folder: BatchFolder
    store: StoreThread
    quota: Quota
    retention_s: float
    clock: Clock
    log: structlog.stdlib.BoundLogger


class BatchRunner:
    def __init__(
        self,
        context: BatchContext,
        answer: AnswerLine,
        turns: Turns,
        metrics: BatchMetrics,
        *,
        max_line_bytes: int,
        elapsed_s: Callable[[], float],
    ) -> None:
        """`elapsed_s`: seconds of a clock that is never set, suspended time included, to judge the wall clock by."""
        self._retention_s = context.retention_s
        self._folder, self._store, self._quota = context.folder, context.store, context.quota
        self._answer = answer
        self._turns = turns
        self._outputs = OutputFiles(context.folder, context.store)
        self._max_line_bytes = max_line_bytes
        self._clock = context.clock
        self._elapsed_s = elapsed_s
        self._sweeps: SweepGuard | None = None
        self._swept_at_s = 0.0  # as the store knows it
        self._clock_suspect = False
        self._metrics = metrics
        self._log = context.log
        self._jobs: dict[str, _Job] = {}
        self._new: asyncio.Queue[str] = asyncio.Queue()
        for status in STATUSES:
            metrics.batches(status).set(0)

    def submit(self, batch_id: str) -> None:
        """Take up a batch that was stored as validating. Without effect where another gateway runs batches."""
        self._new.put_nowait(batch_id)

    def cancel(self, batch_id: str) -> None:
        """Cancel a batch that was stored as cancelling."""
        if (job := self._jobs.get(batch_id)) is not None:
            job.cancelled.set()

    async def run(self) -> NoReturn:
        """Run batches until cancelled; lines in work stay pending. One gateway runs all; when it ends, another."""
        while not await asyncio.to_thread(self._folder.may_run):  # noqa: ASYNC110
            await asyncio.sleep(FOLLOW_S)
        await self._until_it_works("finding unfinished batches", self._find)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sweep(), name="sweep")
            if self._folder.shared:
                tasks.create_task(self._follow(), name="batches of other gateways")
            while True:
                batch_id = await self._new.get()
                if batch_id not in self._jobs:
                    self._jobs[batch_id] = _Job()
                    tasks.create_task(self._job(batch_id), name=batch_id)
        raise AssertionError("unreachable: the loop above ends by cancellation only")

    async def _follow(self) -> NoReturn:
        """Take up batches that other gateways accepted or cancelled."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            await self._until_it_works("finding batches of other gateways", self._poll_store)

    async def _poll_store(self) -> None:
        def read(store: BatchStore) -> tuple[list[str], list[str]]:
            return store.unfinished(), store.cancelling()

        unfinished, cancelling = await self._store.run(read)
        for batch_id in unfinished:
            if batch_id not in self._jobs:
                self.submit(batch_id)
        for batch_id in cancelling:
            self.cancel(batch_id)

    async def _find(self) -> None:
        if reopened := await self._store.run(lambda store: store.reopen_unwritten()):
            self._log.info("batches whose output could not be written are tried again", batches=reopened)
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

    async def _job(self, batch_id: str) -> None:
        job = self._jobs[batch_id]
        with structlog.contextvars.bound_contextvars(batch_id=batch_id):
            await self._until_it_works("batch", lambda: self._go_on(batch_id, job))
            await self._until_it_works("giving disk space back", self._shrink)
        del self._jobs[batch_id]

    async def _until_it_works(self, what: str, step: Callable[[], Awaitable[None]]) -> None:
        wait_s = FIRST_RETRY_S
        while True:
            try:
                return await step()
            except Exception as error:
                if disk_refuses(error):
                    self._log.error(f"{what} cannot go on", reason=_reason(error), retry_after_s=wait_s)
                else:
                    self._log.exception(f"{what} failed unexpectedly", retry_after_s=wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_RETRY_S)

    async def _go_on(self, batch_id: str, job: _Job) -> None:
        """Advance a batch, or fail one that this program cannot run or whose output the disk refuses for good."""
        try:
            if job.failures >= MAX_FAILURES:
                await self._give_up(batch_id, job)
            else:
                await self._advance(batch_id, job)
        except Exception as error:
            refused = disk_refuses(error)
            job.failures += not refused
            since_s = job.writing_since_s
            if not refused or since_s is None or self._clock.now_s() - since_s < bounds.BOUNDS.output_s:
                raise
            await self._leave_unwritten(batch_id, error)

    async def _leave_unwritten(self, batch_id: str, error: Exception) -> None:
        timeout_s = bounds.BOUNDS.output_s
        self._log.error("batch failed: its output cannot be written", reason=_reason(error), results="kept")
        refused = LineError(
            "output_not_written",
            f"The results could not be written to a file for {timeout_s:g} seconds: "
            f"{_cause(error)}. They are kept, and written when the server starts again.",
        )
        now_s = self._clock.wall_s()
        await self._store.run(lambda store: store.leave_unwritten(batch_id, now_s, [refused]))
        await self.count()

    async def _advance(self, batch_id: str, job: _Job) -> None:
        """Advance a batch from its present state to its end."""
        batch = await self._load(batch_id)
        if batch is not None and job.ends_at_s is None:
            job.ends_at_s = self._clock.now_s() + batch.expires_at - self._clock.wall_s()
        if batch is not None and batch.status == "validating":
            await self._validate(batch, job)
            batch = await self._load(batch_id)
        if batch is not None and batch.status == "in_progress":
            await self._run_lines(batch, job)
            batch = await self._load(batch_id)
        if batch is not None and batch.unfinished:
            await self._finalize(batch, job)
        await self.count()

    async def _give_up(self, batch_id: str, job: _Job) -> None:
        """Fail a batch with the results that there are, or without them if they cannot be written."""
        batch = await self._load(batch_id)
        if batch is None or not batch.unfinished:
            return
        self._log.error("batch failed after tries that ended in a defect", tries=MAX_FAILURES)
        try:
            await self._finalize(batch, job, "failed")
        except Exception as error:
            if disk_refuses(error):
                raise
            self._log.exception("the results of a failed batch cannot be written")
            now_s = self._clock.wall_s()
            await self._store.run(lambda store: store.give_up(batch_id, now_s, [INTERNAL_ERROR]))
        await self.count()

    def _remaining_s(self, job: _Job) -> float:
        """Return the seconds until the batch expires."""
        assert job.ends_at_s is not None
        return job.ends_at_s - self._clock.now_s()

    async def _load(self, batch_id: str) -> StoredBatch | None:
        batch = await self._store.run(lambda store: store.batch(batch_id))
        await self.count()
        return batch

    async def _validate(self, batch: StoredBatch, job: _Job) -> None:
        def wanted() -> bool:
            return not job.cancelled.is_set() and self._remaining_s(job) > 0

        path = self._folder.content(batch.input_file_id)
        limits = {"max_lines": bounds.BOUNDS.batch_lines, "max_line_bytes": self._max_line_bytes}
        try:
            reader = await asyncio.to_thread(InputReader, path, batch.endpoint, **limits, wanted=wanted)
        except FileNotFoundError:
            missing = LineError("invalid_input_file", "The content of the input file is gone.")
            await self._store.run(lambda store: store.fail(batch.id, self._clock.wall_s(), [missing]))
            self._log.error("batch refused: the content of its input file is gone", file_id=batch.input_file_id)
            return
        try:
            total = 0
            while wanted() and (found := await asyncio.to_thread(reader.next)):
                await self._store.run(partial(BatchStore.add_lines, batch_id=batch.id, lines=found, first=not total))
                total += len(found)
        finally:
            reader.close()
        now_s = self._clock.wall_s()
        if self._remaining_s(job) <= 0:
            await self._store.run(lambda store: store.expire_unread(batch.id, now_s))
            self._log.warning("batch expired before its input was read", lines=total)
        elif reader.errors:
            await self._store.run(lambda store: store.fail(batch.id, now_s, reader.errors))
            self._log.warning("batch refused", errors=len(reader.errors), first=reader.errors[0].message)
        else:
            await self._store.run(lambda store: store.begin(batch.id, now_s, model=reader.model))
            self._log.info("batch begins", lines=total, endpoint=batch.endpoint)

    async def _run_lines(self, batch: StoredBatch, job: _Job) -> None:
        """Run lines until every one has a result, or the batch is cancelled or expires."""
        remaining_s = self._remaining_s(job)
        lines = asyncio.create_task(self._all_lines(batch), name=f"{batch.id} lines")
        cancelled = asyncio.create_task(job.cancelled.wait())
        try:
            await asyncio.wait((lines, cancelled), timeout=max(0.0, remaining_s), return_when=asyncio.FIRST_COMPLETED)
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
                    await self._storage_for_line(batch)
                    await self._turns.free(batch.owner)
                    await self._turns.take()
                    self._metrics.in_work().set(self._turns.taken)
                    task = tasks.create_task(self._line(batch, line))
                    task.add_done_callback(self._give_back)
                after = page[-1].number

    async def _storage_for_line(self, batch: StoredBatch) -> None:
        """Wait for space: while the store is at its limit, no further line starts."""
        waiting = False
        while not await self._store.run(lambda store: self._quota.may_run_line(store, batch.owner)):
            if not waiting:
                self._log.warning("files and results fill batch.storage_bytes: no further line starts")
                self._metrics.line_retries("storage").inc()
            waiting = True
            await asyncio.sleep(STORAGE_WAIT_S)

    def _give_back(self, _: asyncio.Task[None]) -> None:
        self._turns.give_back()
        self._metrics.in_work().set(self._turns.taken)

    async def _pending(self, batch_id: str, after: int) -> list[PendingLine]:
        return await self._store.run(lambda store: store.pending(batch_id, after=after, limit=PAGE))

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
        """Answer a line; retry while busy, and a few times if workers are lost. Raises `RequestError`."""
        path = self._folder.content(batch.input_file_id)
        body = await asyncio.to_thread(read_body, path, line)
        chat = batch.endpoint == "/v1/chat/completions"
        lost = 0
        while True:
            try:
                caller = Caller(batch.owner, line_id(batch.id, line.number), self._clock.now_s(), BATCH_PRIORITY)
                answer = await self._answer(body, caller, chat=chat)
                if len(answer.body) > MAX_RESULT_BYTES:
                    raise RequestError(f"The answer has more than {MAX_RESULT_BYTES} bytes; ask for less.", status=413)
                return answer
            except KeyLimited as error:
                self._metrics.line_retries("key_limit").inc()
                with self._turns.waiting(batch.owner):
                    await _busy_wait(error.again_s)
                continue
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
            await _busy_wait(wait_s)

    async def _finalize(self, batch: StoredBatch, job: _Job, outcome: Outcome | None = None) -> None:
        """Write the results. Repeated after an interruption, it writes the same files again."""
        if job.writing_since_s is None:
            job.writing_since_s = self._clock.now_s()
        await self._store.run(lambda store: store.begin_finalizing(batch.id, self._clock.wall_s()))
        await self.count()
        status = outcome or await self._outcome(batch)
        output, _ = await self._outputs.write(batch, status, succeeded=True, now_s=self._clock.wall_s())
        errors, unrun = await self._outputs.write(batch, status, succeeded=False, now_s=self._clock.wall_s())
        now_s = self._clock.wall_s()
        reasons = [INTERNAL_ERROR] if status == "failed" else None
        await self._store.run(
            lambda store: store.end(batch.id, now_s, status, output=output, errors=errors, reasons=reasons)
        )
        if unrun:
            self._metrics.lines(status).inc(unrun)
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

    async def _outcome(self, batch: StoredBatch) -> Outcome:
        current = await self._load(batch.id)
        if current is not None and current.cancelling_at is not None:
            return "cancelled"
        return "expired" if await self._pending(batch.id, 0) else "completed"

    async def _sweep(self) -> NoReturn:
        while True:
            await self._until_it_works("deleting what has expired", self.sweep)
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> None:
        """Delete what has expired: rows first, as the next start removes contents without one. After a jump of the wall
        clock nothing is deleted."""
        now_s = self._clock.wall_s()
        if not await self._trusts_clock(now_s):
            return
        expired = await self._store.run(lambda store: store.forget(now_s, self._retention_s))
        if expired:
            await asyncio.to_thread(self._folder.remove, expired)
            self._log.info("expired files deleted", files=len(expired))
            await self.count()
        if abs(now_s - self._swept_at_s) >= NOTE_SWEEP_S:
            await self._store.run(lambda store: store.note_sweep(now_s))
            self._swept_at_s = now_s
        await self._shrink()

    async def _trusts_clock(self, now_s: float) -> bool:
        if self._sweeps is None:
            self._sweeps = SweepGuard(await self._store.run(lambda store: store.swept_at_s()))
        trusted = self._sweeps.is_plausible(now_s, self._elapsed_s())
        if trusted and self._clock_suspect:
            self._log.info("the wall clock is believed again: expired files are deleted")
        elif not trusted and not self._clock_suspect:
            self._log.error(
                "the wall clock jumped: nothing is deleted until it is back or has kept its time for a day",
                jumped_s=round(self._sweeps.jumped_s),
            )
        self._clock_suspect = not trusted
        return trusted

    async def _shrink(self) -> None:
        """Free pages of the database go back to the disk, a few at a time: others use the store in between."""
        while await self._store.run(lambda store: store.shrink()):
            pass


async def _busy_wait(wait_s: float) -> None:
    await asyncio.sleep(min(LONGEST_BUSY_WAIT_S, max(LEAST_BUSY_WAIT_S, wait_s)))


def _reason(error: BaseException) -> str:
    """Return the reason of an error; of a group the first's, which the others share or follow from."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


def _cause(error: BaseException) -> str:
    """Return the reason without paths, for clients."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)


class OutputFiles:
    """Files that a batch ends with: results in the order of its input, then lines that never ran. Repeatable after an
    interruption. Results are read a page of bytes at a time: one may be as large as thousands of others."""

    def __init__(self, folder: BatchFolder, store: StoreThread) -> None:
        self._folder = folder
        self._store = store

    async def write(
        self, batch: StoredBatch, outcome: Outcome, *, succeeded: bool, now_s: float
    ) -> tuple[StoredFile | None, int]:
        """Write the output (`succeeded`) or error file; return it, None if empty, and its number of lines that never
        ran. Raises `OSError`."""
        kind = "output" if succeeded else "error"
        file_id = f"file-{batch.id.removeprefix('batch_')}-{kind}"
        unrun = 0
        with await asyncio.to_thread(self._folder.write, file_id) as writer:
            after = 0
            while results := await self._results(batch.id, succeeded, after):
                await asyncio.to_thread(_write_lines, writer, [result for _, result in results])
                after = results[-1][0]
            if not succeeded and outcome != "completed" and batch.in_progress_at is not None:
                unrun = await self._write_not_run(writer, batch.id, outcome)
            if not writer.bytes:
                return None, 0
            await asyncio.to_thread(writer.commit)
        name, created_at = f"{batch.id}_{kind}.jsonl", int(now_s)
        expires_at = created_at + batch.output_retention_s
        return StoredFile(0, file_id, batch.owner, "batch_output", name, writer.bytes, created_at, expires_at), unrun

    async def _results(self, batch_id: str, succeeded: bool, after: int) -> list[tuple[int, bytes]]:
        return await self._store.run(
            lambda store: store.results(batch_id, succeeded=succeeded, after=after, page_bytes=PAGE_BYTES)
        )

    async def _write_not_run(self, writer: ContentWriter, batch_id: str, reason: NotRun) -> int:
        after = count = 0
        while page := await self._store.run(lambda store: store.pending(batch_id, after=after, limit=PAGE)):  # noqa: B023
            await asyncio.to_thread(_write_lines, writer, [not_run(batch_id, line, reason) for line in page])
            after, count = page[-1].number, count + len(page)
        return count


def _write_lines(writer: ContentWriter, lines: list[bytes]) -> None:
    for line in lines:
        writer.write(line + b"\n")
