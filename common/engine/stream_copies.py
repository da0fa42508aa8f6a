"""A plan's copies between GPU and host memory, on a stream of their own, ordered by marks and awaited once (R12).

The GPU's counterpart of `kv_copies.KvCopier`, used like it by the worker loop. Copies that come first hold up the rows
on the device, not the host; copies beside the rows run while they compute. A slot's way through host memory has a part
that the processor does: out of the host pool before the copy starts, into it when the copy has arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch

from cohort.common.engine.kv_tensors import KvTensors
from cohort.common.engine.streams import Stream
from cohort.common.policies.kv_interface import KvCopy


class StreamCopier:
    """`compute`: the stream that the rows run on."""

    def __init__(self, kv: KvTensors, compute: Stream, copies: Stream) -> None:
        self._kv = kv
        self._compute = compute
        self._copies = copies
        # The processor's work once the copies launched so far are done; `_outward`: some of them write
        # host memory.
        self._landings: list[Callable[[], None]] = []
        self._outward = False

    @contextlib.contextmanager
    def around(self, copies: Iterable[KvCopy]) -> Iterator[None]:
        """All copies are done on exit, those that come first before the rows on the device begin."""
        copies = list(copies)
        if not copies:
            yield
            return
        self._copies.after(self._compute.mark())
        try:
            for copy in copies:
                if not copy.beside:
                    self._launch(copy)
            self._compute.after(self._copies.mark())
            for copy in copies:
                if copy.beside:
                    self._launch(copy)
            yield
        finally:
            self._land()

    def close(self) -> None:
        """Nothing of its own to end: `around` leaves nothing behind."""

    def _launch(self, copy: KvCopy) -> None:
        # The host memory it reads may still be written, and an earlier slot's part would overwrite its own writes.
        if (copy.direction == "in" and self._outward) or (copy.unit == "block" and self._landings):
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
        self._outward |= copy.direction == "out"

    def _land(self) -> None:
        """Wait for all copies, then do the processor's part."""
        self._copies.mark().wait()
        landings, self._landings, self._outward = self._landings, [], False
        with torch.inference_mode():
            for landing in landings:
                landing()
