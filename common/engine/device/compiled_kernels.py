"""Where the engine's compiled kernels are kept, Cohort's cache folder, when they are compiled, and how many were.

Kernels know nothing of Cohort's folders and errors; this is where both are translated. `keep_in_cache` is called before
anything computes, by `ModelRunner` and by measurements that use kernels without one. On a processor the weights are
packed by these kernels, so loading builds them. On a GPU the first copy of host slots would be the first to need them,
in the middle of serving: there `worker_process` starts a `KernelBuild` beside the loading of weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time

import structlog

from cohort.common.errors import ConfigError
from cohort.common.paths import cache_dir
from cohort.kernels.cpu import native
from cohort.kernels.errors import KernelChoiceError

log = structlog.get_logger(__name__)


def keep_in_cache() -> None:
    """Name the cache folder to the kernels; builds nothing. Raises `ConfigError` for a wrong `COHORT_KERNELS`.

    Triton's kernels go there too, unless `TRITON_CACHE_DIR` says otherwise: a worker that starts again, or beside
    others, then compiles none of them. It must be called before anything imports Triton.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_dir() / "triton"))
    try:
        native.keep_in(cache_dir())
    except KernelChoiceError as error:
        raise ConfigError(str(error)) from error


def compilations() -> int:
    """Return the number of variants of GPU kernels that this process has compiled, or read from the cache folder, since
    it loaded Triton. A launch waited for each; after warming up there should be none."""
    variants = sys.modules.get("cohort.kernels.gpu.variants")
    return 0 if variants is None else int(variants.compilations.count)


class KernelBuild:
    """A thread that builds and loads the kernels, from the constructor on. Made on a running event loop."""

    def __init__(self) -> None:
        keep_in_cache()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._started_s = time.monotonic()
        # A daemon: a worker whose model cannot be loaded ends without waiting for a compiler.
        threading.Thread(target=self._build, name="kernel-build", daemon=True).start()

    async def ended(self) -> None:
        """Wait until no call will compile any more, whether kernels are there or the reference has to do."""
        if not self._ended.done():
            log.info("waiting for the kernels to be built", seconds=self._seconds())
        await asyncio.shield(self._ended)

    def _build(self) -> None:
        failure: BaseException | None = None
        try:
            chosen = native.prepare(lambda message: log.info("kernels", progress=message, seconds=self._seconds()))
            log.info("kernels", implementation=chosen, seconds=self._seconds())
        except BaseException as error:  # raised where it is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the worker has ended
            self._loop.call_soon_threadsafe(self._end, failure)

    def _end(self, failure: BaseException | None) -> None:
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(failure)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._started_s, 1)
