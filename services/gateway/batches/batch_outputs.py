"""The files that a batch ends with: results in the order of its input, then the lines that never ran.

Called by `batch_runner.py` when no line is in work any more. Writes what the store has and decides nothing; repeated
after an interruption, it writes the same files again. Reads results a page of bytes at a time, because one result may
be as large as thousands of others.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from cohort.services.gateway.batches.batch_files import BatchFolder, ContentWriter
from cohort.services.gateway.batches.batch_lines import NotRun, not_run
from cohort.services.gateway.batches.batch_records import StoredBatch, StoredFile
from cohort.services.gateway.batches.batch_store import StoreThread

PAGE_BYTES = 1 << 23  # of results in memory at once, and one more result
PAGE_LINES = 256

Outcome = Literal["completed", "expired", "cancelled", "failed"]


class OutputFiles:
    def __init__(self, folder: BatchFolder, store: StoreThread) -> None:
        self._folder = folder
        self._store = store

    async def write(
        self, batch: StoredBatch, outcome: Outcome, *, succeeded: bool, now_s: float
    ) -> tuple[StoredFile | None, int]:
        """The output (`succeeded`) or error file on disk, None when there is nothing to write, and how many lines it
        names that never ran. Raises `OSError`."""
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
            await asyncio.to_thread(writer.keep)
        name, created_at = f"{batch.id}_{kind}.jsonl", int(now_s)
        expires_at = created_at + batch.output_retention_s
        return StoredFile(0, file_id, batch.owner, "batch_output", name, writer.bytes, created_at, expires_at), unrun

    async def _results(self, batch_id: str, succeeded: bool, after: int) -> list[tuple[int, bytes]]:
        return await self._store.run(
            lambda store: store.results(batch_id, succeeded=succeeded, after=after, page_bytes=PAGE_BYTES)
        )

    async def _write_not_run(self, writer: ContentWriter, batch_id: str, reason: NotRun) -> int:
        after = count = 0
        while page := await self._store.run(lambda store: store.pending(batch_id, after=after, limit=PAGE_LINES)):  # noqa: B023
            await asyncio.to_thread(_write_lines, writer, [not_run(batch_id, line, reason) for line in page])
            after, count = page[-1].number, count + len(page)
        return count


def _write_lines(writer: ContentWriter, lines: list[bytes]) -> None:
    for line in lines:
        writer.write(line + b"\n")
