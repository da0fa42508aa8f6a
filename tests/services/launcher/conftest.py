"""Toy processes in place of the real ones, so that supervision is tested without a model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cohort.common.http.ports import free_port
from cohort.services.launcher import hosts
from cohort.services.launcher.console import Console, Line
from cohort.services.launcher.local_hosts import LocalHosts
from cohort.services.launcher.plan import ProcessPlan, StopStage
from cohort.services.launcher.processes.child import Child, started
from cohort.services.launcher.processes.forks import Forks
from cohort.services.launcher.run_files import RunFiles
from cohort.services.launcher.supervisor import Supervisor

TOY = Path(__file__).with_name("toy_process.py")


@dataclass(frozen=True)
class ToyPlan(ProcessPlan):
    behaviour: str = "ready"

    def command(self, python: str, config_file: Path, run_dir: Path) -> list[str]:
        return [python, str(TOY), self.behaviour, str(self.port), str(run_dir / f"{self.instance}.marker")]


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """Replace the templates: a toy imports nothing. Return what was to be forked: the template's modules, the toy's
    behaviour."""
    forked: list[tuple[list[str], str]] = []

    class Unforked(Forks):
        async def child(
            self, command: Sequence[str], log_file: Path, environment: Mapping[str, str], listeners: Sequence[int] = ()
        ) -> Child:
            forked.append((self._modules, command[2]))
            return started(command, log_file, environment, listeners)

    monkeypatch.setattr("cohort.services.launcher.local_hosts.Forks", Unforked)
    return forked


class Pipeline:
    """A supervisor over toy processes, running in the background of a test."""

    def __init__(self, files: RunFiles, plans: Sequence[ProcessPlan]) -> None:
        self.files = files
        self.ready = asyncio.Event()
        console = Console([Line(plan.instance, plan.port, files.log_file(plan.instance)) for plan in plans])
        pipeline = hosts.Pipeline(files, console, lambda: None)
        self.supervisor = Supervisor(pipeline, LocalHosts(files), plans)
        self.task = asyncio.create_task(self.supervisor.run(self.ready.set))

    def pid(self, instance: str) -> int:
        return self.supervisor.marks[instance].pid

    async def until_ready(self) -> None:
        async with asyncio.timeout(20):
            await self.ready.wait()

    async def exit_code(self) -> int:
        async with asyncio.timeout(30):
            return await self.task


@pytest.fixture
def files(tmp_path: Path) -> Iterator[RunFiles]:
    made = RunFiles(tmp_path / "run")
    with made.claim():
        yield made


@pytest.fixture
def toys() -> Callable[..., list[ProcessPlan]]:
    """`toys(gateway="ready", manager="crash")` → plans in the stages of these names."""
    workers = ("prefill-0", "decode-0")
    stages = {"gateway": StopStage.GATEWAY, "manager": StopStage.MANAGER, **dict.fromkeys(workers, StopStage.WORKERS)}

    def make(**behaviours: str) -> list[ProcessPlan]:
        block = free_port()
        return [
            ToyPlan(
                name,
                name,
                stages.get(name, StopStage.OTHERS),
                "127.0.0.1",
                block + index,
                drain_s=-6.0,
                behaviour=behaviour,
                starts_alone=name in workers,
            )
            for index, (name, behaviour) in enumerate(behaviours.items())
        ]

    return make


@pytest.fixture
async def run(files: RunFiles):
    """Start a pipeline; it is ended with the test."""
    started: list[Pipeline] = []

    def start(plans: Sequence[ProcessPlan]) -> Pipeline:
        started.append(Pipeline(files, plans))
        return started[-1]

    yield start
    for pipeline in started:
        pipeline.supervisor.request_stop()
        pipeline.supervisor.request_stop()
        with contextlib.suppress(asyncio.CancelledError):
            await pipeline.exit_code()
