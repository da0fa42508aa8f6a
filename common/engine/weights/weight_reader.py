"""Reads tensors of weight files with several threads, in chunks, into their place: directly, or by way of the host.

    CPU, the file's dtype     file ──▶ place
    CPU, another dtype        file ──▶ chunk ──cast──▶ place
    GPU                       file ──▶ page-locked chunk ══ copied by the device ══▶ place

Called by `weights` for every tensor. On a processor `read` returns when the bytes are there, because they are packed
next; on a GPU at once, and `finish` waits. Host memory beside the places: `THREADS` threads with two chunks each on a
GPU, one where a dtype is cast, none else. Decides nothing about names and shapes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import structlog
import torch
from torch import Tensor

from cohort.common.devices.cores import usable_cores
from cohort.common.engine.cache.kv_tensors import page_locked
from cohort.common.engine.device.streams import Mark, Stream, stream_for
from cohort.kernels.cpu.panels import huge_zeros

log = structlog.get_logger(__name__)

THREADS = 8
"""The max number of threads; no more than this process has cores, on a processor no more than compute."""
CHUNK_BYTES = 8 << 20
_INLINE_BYTES = 64 << 10  # on a processor the calling thread reads what is smaller
_PROGRESS_S = 1.0
_HUGE_BYTES = 4 << 20  # tensors from here on lie on huge pages, which a processor fills with far fewer faults


class Source(Protocol):
    """A tensor's elements in a file, in order."""

    dtype: torch.dtype

    def fill(self, target: Tensor, first: int) -> None:
        """target [n], contiguous, of this dtype on the host = elements from `first` on. From any thread.

        Raises `ModelError` where the file does not have them.
        """


class Progress:
    """One line a second at most while weights are read, and one at the end."""

    def __init__(self, total_bytes: int, now_s: Callable[[], float] = time.monotonic) -> None:
        """`total_bytes`: of all tensors in the files; some may never be read."""
        self._total, self._now_s = total_bytes, now_s
        self._lock = threading.Lock()
        self._started_s = self._logged_s = now_s()
        self._done = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that were read, from any thread."""
        with self._lock:
            self._done += num_bytes
            now_s = self._now_s()
            if now_s - self._logged_s < _PROGRESS_S:
                return
            self._logged_s = now_s
            done = self._done
        percent = min(100, 100 * done // max(1, self._total))
        log.info("loading weights", percent=percent, gigabytes_per_s=self._rate(done, now_s))

    def end(self) -> None:
        now_s = self._now_s()
        log.info(
            "weights read",
            gigabytes=round(self._done / 1e9, 2),
            seconds=round(now_s - self._started_s, 2),
            gigabytes_per_s=self._rate(self._done, now_s),
        )

    def _rate(self, done: int, now_s: float) -> float:
        return round(done / 1e9 / max(1e-9, now_s - self._started_s), 2)


@dataclass(slots=True)
class _Lane:
    """A thread's stream and chunks. `marks`: behind the last copy out of each chunk."""

    stream: Stream
    cast: Tensor | None = None
    chunks: list[Tensor] = field(default_factory=list)
    marks: list[Mark | None] = field(default_factory=list)
    next: int = 0


class WeightReader:
    def __init__(
        self,
        device: torch.device,
        progress: Progress,
        *,
        threads: int = 0,
        staged: bool | None = None,
        streams: Callable[[torch.device], Stream] = stream_for,
    ) -> None:
        """`threads` 0: as many as suit. `staged`: by way of chunks, as on a GPU; None = on one."""
        self._device, self._progress, self._streams = device, progress, streams
        self._staged = device.type != "cpu" if staged is None else staged
        most = usable_cores() if device.type != "cpu" else min(usable_cores(), torch.get_num_threads())
        self._threads = threads or min(THREADS, most)
        # One OpenMP thread each: these threads are the parallelism.
        self._pool = ThreadPoolExecutor(
            self._threads, thread_name_prefix="weights", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._own = threading.local()
        self._lanes: list[_Lane] = []
        self._pending: list[Future[None]] = []

    def read(self, sources: Sequence[tuple[Source, Tensor]]) -> None:
        """Read each source into its place, a contiguous tensor of as many elements; see above for when it is there."""
        for source, place in sources:
            flat = place.view(-1)
            if not self._staged and flat.numel() * source.dtype.itemsize <= _INLINE_BYTES:
                self._read_chunk(source, flat, 0)
                continue
            step = CHUNK_BYTES // max(source.dtype.itemsize, flat.dtype.itemsize)
            for first in range(0, flat.numel(), step):
                chunk = flat[first : first + step]
                self._pending.append(self._pool.submit(self._read_chunk, source, chunk, first))
        self._settle(wait=not self._staged)

    def wait_read(self) -> None:
        """Wait until all that was read so far is there."""
        self._settle(wait=True)
        for lane in self._lanes:
            lane.stream.mark().wait()

    def finish(self) -> None:
        """Wait until everything is there, and end the threads; also after an error, which it raises."""
        try:
            self.wait_read()
        except BaseException:
            self.abandon()
            raise
        self._pool.shutdown()
        self._lanes.clear()
        self._progress.end()

    def abandon(self) -> None:
        """Read nothing further."""
        self._pool.shutdown(cancel_futures=True)
        for lane in self._lanes:
            lane.stream.mark().wait()
        self._lanes.clear()

    def _settle(self, *, wait: bool) -> None:
        """Raise what reading failed by: of all chunks, which it waits for, or of those that are done."""
        pending, self._pending = self._pending, []
        for future in pending:
            if wait or future.done():
                future.result()
            else:
                self._pending.append(future)

    def _read_chunk(self, source: Source, place: Tensor, first: int) -> None:
        """Read on a thread of the pool; or inline, then neither staged nor large."""
        with torch.inference_mode():
            if self._staged:
                self._by_way_of_the_host(source, place, first)
            elif source.dtype == place.dtype:
                source.fill(place, first)
            else:
                place.copy_(self._filled(source, first, len(place)))
        self._progress.add(len(place) * source.dtype.itemsize)

    def _by_way_of_the_host(self, source: Source, place: Tensor, first: int) -> None:
        lane = self._lane()
        if not lane.chunks:
            lane.chunks = [page_locked(CHUNK_BYTES, self._device) for _ in range(2)]
            lane.marks = [None, None]
        index, lane.next = lane.next, 1 - lane.next
        if (mark := lane.marks[index]) is not None:
            mark.wait()  # the device may still read what was in this chunk
        chunk = lane.chunks[index].view(place.dtype)[: len(place)]
        if source.dtype == place.dtype:
            source.fill(chunk, first)
        else:
            chunk.copy_(self._filled(source, first, len(place)))
        with lane.stream.use():
            launch_copy(place, chunk)
        lane.marks[index] = lane.stream.mark()

    def _filled(self, source: Source, first: int, count: int) -> Tensor:
        """Return elements as the file has them, in a chunk that holds until this thread's next call."""
        lane = self._lane()
        if lane.cast is None:
            lane.cast = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        chunk = lane.cast.view(source.dtype)[:count]
        source.fill(chunk, first)
        return chunk

    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._own, "lane", None)
        if lane is None:
            lane = self._own.lane = _Lane(self._streams(self._device))
            self._lanes.append(lane)
        return lane


def launch_copy(place: Tensor, chunk: Tensor) -> None:
    """Copy on the calling thread's stream; not awaited where the device copies by itself."""
    place.copy_(chunk, non_blocking=True)


def place(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate memory for a tensor that is read."""
    size = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and size >= _HUGE_BYTES:
        return huge_zeros(size).view(dtype).view(shape)
    return torch.empty(shape, dtype=dtype, device=device)
