"""One pipeline for all tests here that need no other: each puts back what it breaks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.streams import DECODE, VOCABULARY
from tests.e2e.pipeline import START_TIMEOUT_S, Pipeline
from tests.e2e.tiny_models import qwen2, save
from tests.services.gateway.tiny_model import EOS, TEMPLATE, byte_level

COMMON = {"engine": {"threads": 1}, "kv": {"memory_bytes": 64 << 20, "host_memory_bytes": 0}}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    model, tokenizer = qwen2(), byte_level(VOCABULARY)
    model.config.eos_token_id = tokenizer.token_to_id(EOS)
    save(model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Pipeline]:
    """A worker of it that is not scheduled for seconds is not dead."""
    folder = tmp_path_factory.mktemp("chaos")
    with held(folder, tiny_model, batch={"concurrency": 4}, manager={"report_timeout_s": 60.0}) as made:
        yield made


def held(folder: Path, model: Path, **more: Any) -> Pipeline:
    """Its decode worker stands still where a test wants it."""
    made = Pipeline(folder, model, {**COMMON, **more}, preset="disaggregated")
    made.held.add(DECODE)
    return made


@pytest.fixture
def pipeline(running: Pipeline) -> Pipeline:
    return repaired(running)


def repaired(pipeline: Pipeline) -> Pipeline:
    """With what an earlier test killed and, failing, did not start again."""
    if pipeline.processes.keys() != set(pipeline.names):
        whole(pipeline)
    return pipeline


def whole(pipeline: Pipeline) -> None:
    """Start what is not there, and wait until every process is ready and the manager knows the workers: what the
    monitor heard of those that were killed does not count."""
    for name in pipeline.names:
        if name not in pipeline.processes:
            pipeline.start(name)
    deadline = time.monotonic() + START_TIMEOUT_S
    waiting = set(pipeline.processes) - {"monitor"}
    while waiting:
        assert time.monotonic() < deadline, f"not ready: {waiting}"
        with contextlib.suppress(OSError):  # the monitor is not there yet
            waiting -= {
                name for name, it in pipeline.state().items() if it["ready"] and is_of(pipeline, name, it["pid"])
            }
        time.sleep(0.05)
    pipeline.wait_told("manager")
    pipeline.wait_ready()


def is_of(pipeline: Pipeline, name: str, pid: int) -> bool:
    """Whether this process is the one that runs now."""
    return name in pipeline.processes and pipeline.processes[name].pid == pid
