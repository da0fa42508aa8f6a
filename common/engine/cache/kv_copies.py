"""A plan's copies between device and host memory: before its rows, or concurrent with them (R12).

Called by the worker loop on the engine thread. Decides nothing: which copy may run beside the rows is in the plan. On a
processor, and in a rank that follows, a thread makes the concurrent ones. On a GPU all are on a stream of their own,
ordered by marks and awaited once. What goes out before the rows, because they write over it, is gathered on the GPU
first (`STAGED_BYTES` at most): the rows wait for that alone, and its way over the host link runs beside them. A copy's
way through host memory has a part that the processor does: out of the host pool before the copy starts, into it when
the copy has arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.device.streams import Stream, stream_for
from cohort.common.policies.kv_interface import KvCopy, can_overlap


class KvCopier:
    """The copier of a processor, and of a rank that follows, with a thread of its own."""

    def __init__(self, kv: KvTensors) -> None:
        self._kv = kv
        # With one OpenMP thread it takes no core from the forward's pool, whose size was set when its thread began.
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="kv-copies", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._stream = stream_for(kv.device)

    @contextlib.contextmanager
    def around(self, copies: Iterable[KvCopy]) -> Iterator[None]:
        """Make the copies that come first on entry, the concurrent ones until exit."""
        concurrent = list[KvCopy]()
        for copy in copies:
            if copy.concurrent:
                concurrent.append(copy)
            else:
                self._perform(copy)
        if not concurrent:
            yield
            return
        pending = self._thread.submit(self._perform_on_thread, concurrent)
        try:
            yield
        finally:
            pending.result()

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _perform_on_thread(self, copies: list[KvCopy]) -> None:
        with torch.inference_mode(), self._stream.use():
            for copy in copies:
                self._perform(copy)

    def _perform(self, copy: KvCopy) -> None:
        kv, pairs = self._kv, (copy.device, copy.host)
        match copy.direction, copy.unit:
            case "out", "block":
                kv.copy_out(list(zip(*pairs, strict=True)))
            case "in", "block":
                kv.copy_in(list(zip(*reversed(pairs), strict=True)))
            case "out", "slot":
                kv.copy_slots_out(*pairs)
            case "in", "slot":
                kv.copy_slots_in(*pairs)


class StreamCopier:
    """The copier of a GPU, used like `KvCopier`."""

    def __init__(self, kv: KvTensors, compute: Stream, copies: Stream) -> None:
        """`compute`: the stream that the rows run on."""
        self._kv = kv
        self._compute = compute
        self._copies = copies
        # The processor's work once the copies launched so far are done, and the host blocks that those write.
        self._landings: list[Callable[[], None]] = []
        self._written: set[int] = set()

    @contextlib.contextmanager
    def around(self, copies: Iterable[KvCopy]) -> Iterator[None]:
        """Launch all copies, which are done on exit. The rows on the device begin when what comes in first is there,
        and what they write over is gathered."""
        copies = list(copies)
        if not copies:
            yield
            return
        self._copies.after(self._compute.mark())
        staged: list[tuple[KvCopy, torch.Tensor]] = []
        try:
            stages = can_overlap(copies, self._kv.geometry)
            for copy in copies:
                if copy.concurrent:
                    continue
                if stages and copy.device:
                    staged.append((copy, self._staged(copy)))
                else:
                    self._launch(copy)
            self._compute.after(self._copies.mark())
            self._send_all(staged)
            for copy in copies:
                if copy.concurrent:
                    self._launch(copy)
            yield
        finally:
            self._send_all(staged)  # of copies before one that failed
            self._land()

    def close(self) -> None:
        """End nothing: `around` leaves nothing behind."""

    def _staged(self, copy: KvCopy) -> torch.Tensor:
        with torch.inference_mode(), self._copies.use():
            if copy.unit == "block":
                return self._kv.staged_blocks(copy.device)
            return self._kv.staged(torch.tensor(copy.device))

    def _send_all(self, staged: list[tuple[KvCopy, torch.Tensor]]) -> None:
        for copy, tokens in staged:
            self._send(copy, tokens)
        staged.clear()

    def _send(self, copy: KvCopy, staged: torch.Tensor) -> None:
        kv, places = self._kv, copy.host
        with torch.inference_mode(), self._copies.use():
            tokens = kv.to_host(staged)
        if copy.unit == "block":
            self._landings.append(lambda: kv.blocks_on_host(tokens, places))
        else:
            self._landings.append(lambda: kv.scatter_on_host(tokens, places))
        self._written |= self._host_blocks(copy)

    def _launch(self, copy: KvCopy) -> None:
        # The host memory it reads may still be written, and an earlier copy's part would overwrite its own writes.
        if self._written & self._host_blocks(copy):
            self._land()
        with torch.inference_mode(), self._copies.use():
            kv = self._kv
            match copy.direction, copy.unit:
                case "out", "block":
                    kv.copy_out(list(zip(copy.device, copy.host, strict=True)))
                case "in", "block":
                    kv.copy_in(list(zip(copy.host, copy.device, strict=True)))
                case "out", "slot" if copy.device:
                    tokens, slots = kv.gather(torch.tensor(copy.device)), copy.host
                    self._landings.append(lambda: kv.scatter_on_host(tokens, slots))
                case "in", "slot":
                    kv.copy_slots_in(copy.device, copy.host)
        if copy.direction == "out":
            self._written |= self._host_blocks(copy)

    def _host_blocks(self, copy: KvCopy) -> set[int]:
        if copy.unit == "block":
            return set(copy.host)
        return {slot // self._kv.geometry.block_size for slot in copy.host}

    def _land(self) -> None:
        """Wait for all copies, then do the processor's part."""
        self._copies.mark().wait()
        landings, self._landings, self._written = self._landings, [], set()
        with torch.inference_mode():
            for landing in landings:
                landing()
