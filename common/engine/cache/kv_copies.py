"""Performs a plan's copies between device and host memory: before its rows, or beside them on a thread (R12).

Called by the worker loop on the engine thread. Decides nothing: which copy may run beside the rows is in the plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.policies.kv_interface import KvCopy


class KvCopier:
    """Owns one thread; `close` ends it."""

    def __init__(self, kv: KvTensors) -> None:
        self._kv = kv
        # With one OpenMP thread it takes no core from the forward's pool, whose size was set when its thread began.
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="kv-copies", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._stream: Any = None

    @contextlib.contextmanager
    def around(self, copies: Iterable[KvCopy]) -> Iterator[None]:
        """The copies that come first are done on entry, those beside the rows on exit."""
        copies = list(copies)
        for copy in copies:
            if not copy.beside:
                self._perform(copy)
        beside = [copy for copy in copies if copy.beside]
        if not beside:
            yield
            return
        pending = self._thread.submit(self._perform_all, beside)
        try:
            yield
        finally:
            pending.result()

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _perform_all(self, copies: list[KvCopy]) -> None:
        with torch.inference_mode(), self._own_stream():
            for copy in copies:
                self._perform(copy)

    def _own_stream(self) -> contextlib.AbstractContextManager[Any]:
        if self._kv.device.type != "cuda":
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._kv.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)

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
