"""Tensor-parallel groups for tests: the test's process is rank 0, the other ranks are processes of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cohort.common.config import LoggingConfig
from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.ranks.followers import Followers
from cohort.common.engine.ranks.rank_messages import Setup
from cohort.common.engine.ranks.ranks import RankGroup
from cohort.common.engine.runner.model_runner import ModelRunner
from tests.engine_models import BLOCK_SIZE, make_runner


@contextmanager
def group_runner(
    folder: Path, degree: int, *, graphs: Sequence[int] = (), devices: Sequence[str] = (), **overrides: Any
) -> Iterator[ModelRunner]:
    """Like `make_runner`, of so many ranks. `graphs`: bytes for recorded steps of each rank, which then runs as on a
    GPU. `devices`: of each rank. One at a time in a process."""
    if degree == 1:
        yield make_runner(folder, **overrides)
        return
    options: dict[str, Any] = {
        "dtype": "float32",
        "num_blocks": 96,
        "host_blocks": 8,
        "max_rows": 16,
        "max_step_tokens": 256,
        "weights": "files",
        "device_steps": bool(graphs),
        **overrides,
    }
    with Followers(degree, threads=1) as followers:

        def setup(rank: int) -> Setup:
            return Setup(
                instance="test",
                rank=rank,
                degree=degree,
                store=followers.store,
                model_dir=str(folder),
                device=devices[rank] if devices else "cpu",
                threads=1,
                block_size=BLOCK_SIZE,
                max_context=0,
                memory_fraction=0.9,
                sharers=1,
                most_kv=0,
                logging=LoggingConfig(level="warning"),
                graphs=graphs[rank] if graphs else 0,
                **options,
            )

        followers.set_up(setup)
        group = RankGroup(0, degree, followers.store, followers.meet)
        share = DeviceShare(graphs=graphs[0] if graphs else 0)
        own = {**options, "device": devices[0]} if devices else options
        runner = make_runner(folder, group=group, followers=followers, share=share, **own)
        try:
            yield runner
        finally:
            assert runner.ranks is not None
            if runner._device_steps is not None:
                runner._device_steps.forget()
            runner.ranks.close()
