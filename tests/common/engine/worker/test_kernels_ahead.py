"""Kernels are built before a worker on a GPU is ready, not at the first copy of host slots; threads while it loads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from cohort.common.config import Config
from cohort.common.engine.device import compiled_kernels
from cohort.common.engine.worker import worker_process
from cohort.common.engine.worker.devices import WorkerDevice
from cohort.common.engine.worker.shared_cores import SharedCores
from cohort.common.errors import ModelError
from cohort.common.types import Role
from cohort.kernels.cpu import native
from cohort.kernels.errors import KernelBuildError


class SlowBuild:
    """A compiler that ends when it is told to, and fails: then the reference has to do."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self, cache: Path, report: Callable[[str], None] = lambda words: None) -> Path:
        self.calls += 1
        report("compiling 0/5")
        self.begun.set()
        assert self.end.wait(30)
        report("compiling 5/5")
        raise KernelBuildError("no C++ compiler found")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowBuild]:
    build = SlowBuild()
    monkeypatch.delenv("COHORT_KERNELS", raising=False)
    monkeypatch.setattr(native, "build", build)
    monkeypatch.setattr(native, "_decided", False)
    monkeypatch.setattr(native, "_operators", None)
    yield build
    build.end.set()
    for thread in threading.enumerate():
        if thread.name == "kernel-build":
            thread.join(30)  # before what it decides is undone


@pytest.fixture
def engine() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as engine:
        yield engine


class Runner:
    def __init__(self) -> None:
        self.warm = False

    def warm_up(self) -> None:
        self.warm = True


GPU = WorkerDevice(torch.device("cuda", 0), Role.UNIFIED)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any]) -> None:
    monkeypatch.setattr(worker_process, "load_runner", load)


def config(host_memory_bytes: int) -> Config:
    plain = Config()
    return Config(kv=type(plain.kv)(host_memory_bytes=host_memory_bytes))


async def test_ready_means_built_and_both_go_on_side_by_side(
    build: SlowBuild, engine: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> Runner:
        assert build.begun.wait(30)  # it goes on while the weights load
        return runner

    runner = Runner()
    on_a_gpu(monkeypatch, load)
    with structlog.testing.capture_logs() as logs:
        ready = asyncio.create_task(worker_process.load_ready_runner(config(1 << 20), 1, GPU, engine))
        while not any(entry["event"].startswith("waiting for the kernels") for entry in logs):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert runner.warm and not ready.done()
        build.end.set()
        assert await ready is runner  # type: ignore[comparison-overlap]
        assert native.ops_for(torch.ones(1)) is None
    assert build.calls == 1  # the copy that needs kernels compiles nothing
    assert [entry["progress"] for entry in logs if "progress" in entry] == ["compiling 0/5", "compiling 5/5"]


async def test_nothing_is_built_without_host_blocks(
    build: SlowBuild, engine: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, lambda *_: Runner())
    await worker_process.load_ready_runner(config(0), 1, GPU, engine)
    assert build.calls == 0


async def test_a_worker_loads_with_one_thread_where_others_compute_on_its_cores(
    engine: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Threads(Runner):
        def use_threads(self, threads: int) -> None:
            assert self.warm
            used.append(threads)

    def load(_: Config, threads: int, *__: Any) -> Runner:
        used.append(threads)
        return Threads()

    on_a_gpu(monkeypatch, load)
    processor = WorkerDevice(torch.device("cpu"), Role.UNIFIED)
    own, other = (SharedCores(tmp_path / "computing", name, threads=2, cores=2) for name in ("unified-0", "unified-1"))
    used = list[int]()
    await worker_process.load_ready_runner(config(0), 2, processor, engine, cores=own)
    with other.computing():
        await worker_process.load_ready_runner(config(0), 2, processor, engine, cores=own)
    assert used == [2, 1, 2]


async def test_a_model_that_cannot_be_loaded_does_not_wait_for_the_compiler(
    build: SlowBuild, engine: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> Runner:
        raise ModelError("no such model")

    on_a_gpu(monkeypatch, load)
    with pytest.raises(ModelError):
        await worker_process.load_ready_runner(config(1 << 20), 1, GPU, engine)
    assert not build.end.is_set()


async def test_a_defect_of_the_build_is_told_where_it_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(report: Callable[[str], None]) -> str:
        raise ValueError("a defect")

    monkeypatch.setattr(native, "prepare", broken)
    with pytest.raises(ValueError, match="a defect"):
        await compiled_kernels.KernelBuild().ended()
