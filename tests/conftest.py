"""Fixtures that every test may use."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cohort.common import paths
from tests.examples import nightly, register_profiles
from tests.support import user_cache
from tests.support.steady_loop import SteadyPolicy

if TYPE_CHECKING:
    from tests.e2e.pipeline import Pipeline

register_profiles()

CACHES = user_cache.begin()

# Deadlines pass only while this process is scheduled.
asyncio.set_event_loop_policy(SteadyPolicy())

# Triton decides when it is imported whether kernels are compiled or interpreted. Without a GPU nothing compiled runs.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


LONG_FIRST = (
    *("chaos", "services/launcher", "e2e", "scripts", "security/deployment", "services/simulator", "common/transport"),
    *("security", "services/bench", "common/engine", "kernels"),
)
"""With files of half a minute, or that wait: where several forks share the files, a long one at the end leaves the
others idle, and what waits has others beside it that compute."""
LAST = ("services/length_predictor",)
"""Wait for a process of the lowest priority, for minutes where all cores are taken."""


def pytest_configure(config: pytest.Config) -> None:
    """Answers of `transformers` outlive the run in pytest's own cache, where it has one. Nothing that is imported while
    tests are collected is garbage: to look for some takes two seconds."""
    gc.disable()
    if (kept := getattr(config, "cache", None)) is not None:
        os.environ["COHORT_TEST_GOLDENS"] = str(kept.mkdir("goldens"))


def pytest_collection_finish() -> None:
    """What was imported is nobody's garbage; every collection would go through it for a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if CACHES is not None and user_cache.strayed(CACHES):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if CACHES is not None and (strayed := user_cache.strayed(CACHES)):
        terminalreporter.section("FAILED: tests wrote to the user's cache folder instead of the run's", red=True)
        for path in strayed:
            terminalreporter.line(path)


def pytest_unconfigure() -> None:
    if CACHES is not None:
        user_cache.end(CACHES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        found = [place for place, folder in enumerate(LONG_FIRST) if item.nodeid.startswith(f"tests/{folder}/")]
        late = item.nodeid.startswith(tuple(f"tests/{folder}/" for folder in LAST))
        return min(found, default=len(LONG_FIRST)) + late

    items.sort(key=place)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's folder; `scripts/test` makes it."""
    path = Path(os.environ.get("COHORT_TEST_MODEL") or paths.default_model_dir())
    if not (path / "config.json").is_file():
        pytest.skip(f"no model in {path}; scripts/setup makes it")
    return path


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    """What takes the default model's tokens; nightly the default model itself."""
    if nightly():
        return default_model
    from tests.e2e.tiny_models import save_stand_in

    save_stand_in(default_model, folder := tmp_path_factory.mktemp("small") / "model")
    return folder


@pytest.fixture(scope="session")
def standard(tmp_path_factory: pytest.TempPathFactory, small_model: Path, default_model: Path) -> Iterator[Pipeline]:
    """A running pipeline in which every request crosses two workers, for all live tests that need no other: to start
    one takes seconds. A test that breaks a part of it starts it again and leaves nothing behind.
    Clients of other projects are given text that makes sense."""
    from tests.e2e.pipeline import CONTEXT_LIMIT, Pipeline

    overrides = {"model": {"max_model_len": CONTEXT_LIMIT}, "kv": {"memory_bytes": 200 << 20}}
    model = default_model if os.environ.get("COHORT_CLIENTS") else small_model
    with Pipeline(tmp_path_factory.mktemp("standard"), model, overrides, preset="disaggregated") as running:
        yield running
