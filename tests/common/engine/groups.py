"""Tensor-parallel groups for tests: the test's process is rank 0, the other ranks are processes of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from msgspec import structs

from cohort.common.config import LoggingConfig
from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.config.runner_options import RunnerOptions
from cohort.common.engine.ranks import followers as ranks_followers
from cohort.common.engine.ranks.followers import Followers
from cohort.common.engine.ranks.rank_messages import Setup
from cohort.common.engine.ranks.ranks import RankSettings
from cohort.common.engine.runner.model_runner import ModelRunner
from tests.common.engine.forked_ranks import start_rank
from tests.engine_models import make_runner, runner_options


@contextmanager
def group_runner(
    folder: Path, degree: int, *, graphs: Sequence[int] = (), devices: Sequence[str] = (), **overrides: Any
) -> Iterator[ModelRunner]:
    """Like `make_runner`, of so many ranks. `graphs`: bytes for recorded steps of each rank, which then runs as on a
    GPU. `devices`: of each rank. One at a time in a process."""
    if degree == 1:
        yield make_runner(folder, **overrides)
        return
    options = runner_options(device_steps=bool(graphs), **overrides)

    def of_rank(rank: int) -> RunnerOptions:
        share = DeviceShare(graphs=graphs[rank] if graphs else 0)
        return structs.replace(options, share=share, device=devices[rank] if devices else "cpu")

    with patch.object(ranks_followers, "start_rank", start_rank):
        started = Followers(degree, threads=1)
    with started as followers:

        def setup(rank: int) -> Setup:
            logging = LoggingConfig(level="warning")
            return Setup("test", rank, degree, followers.store, str(folder), of_rank(rank), logging)

        followers.set_up(setup)
        group = RankSettings(0, degree, followers.store, followers.meet)
        runner = ModelRunner(folder, of_rank(0), group, followers)
        try:
            yield runner
        finally:
            assert runner.ranks is not None
            if runner._device_steps is not None:
                runner._device_steps.forget()
            runner.ranks.close()
