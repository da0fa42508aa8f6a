"""Defaults by device: what a GPU machine has, what stays as it is, what wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from cohort.common.config import Config, dump_config, load_config
from cohort.common.config.device_defaults import GPU_CLASSES, LARGEST_HOST_POOL_BYTES, Machine, gpu_class
from cohort.common.policies import compose
from tests.common.devices.fakes import GIB

H200_BOX = Machine(8, 141 * GIB, 2048 * GIB)
NO_GPU = Machine(0, 0, 512 * GIB)


def sizes(config: Config) -> tuple[int, ...]:
    engine = config.engine
    return engine.max_step_tokens, engine.prefill_chunk, engine.max_rows, config.kv.host_memory_bytes


def test_a_cpu_keeps_the_built_in_defaults() -> None:
    assert load_config(machine=lambda: NO_GPU) == load_config() == Config()
    wanted = load_config(overrides={"engine": {"device": "cpu"}}, machine=lambda: H200_BOX)
    assert sizes(wanted) == sizes(Config()) == (2048, 512, 256, 256 << 20)


def test_a_gpu_has_sizes_by_its_memory() -> None:
    assert sizes(load_config(machine=lambda: H200_BOX)) == (8192, 2048, 1024, 64 * GIB)
    assert sizes(load_config(machine=lambda: Machine(1, 24 * GIB, 64 * GIB))) == (4096, 1024, 256, 16 * GIB)
    by_memory = [gpu_class(gib * GIB) for gib in (16, 24, 80, 141)]
    assert by_memory == list(reversed(GPU_CLASSES))
    for field in ("max_step_tokens", "prefill_chunk", "max_rows"):
        values = [getattr(each, field) for each in by_memory]
        assert values == sorted(values)


@pytest.mark.parametrize(("gpus", "ram_gib", "pool_gib"), [(1, 64, 16), (1, 1024, 64), (8, 2048, 64), (8, 256, 16)])
def test_host_pools_leave_half_of_the_ram(gpus: int, ram_gib: int, pool_gib: int) -> None:
    pool = load_config(machine=lambda: Machine(gpus, 80 * GIB, ram_gib * GIB)).kv.host_memory_bytes
    assert pool == pool_gib * GIB <= LARGEST_HOST_POOL_BYTES
    assert gpus * pool <= ram_gib * GIB / 2


def test_files_win_over_the_device_and_the_device_over_nothing_else(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("engine: {prefill_chunk: 640}\nkv: {host_memory_bytes: 1000}\n")
    config = load_config([own], preset="alignedserve", machine=lambda: H200_BOX)
    assert sizes(config) == (8192, 640, 1024, 1000)
    # A preset's pool is what its policies need at least.
    assert load_config(preset="alignedserve", machine=lambda: H200_BOX).kv.host_memory_bytes == 64 * GIB
    assert load_config(preset="alignedserve").kv.host_memory_bytes == 2 * GIB


def test_a_settled_file_is_read_as_it_is_wherever_it_is_read(tmp_path: Path) -> None:
    settled = load_config(preset="unified", machine=lambda: H200_BOX)
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_config(settled))
    assert load_config([file], machine=lambda: pytest.fail("asked")) == settled
    assert load_config([file]) == settled


def test_a_device_that_is_named_counts_where_nothing_is_asked() -> None:
    """The simulator, and a process on a host without a GPU of a pipeline that has some."""
    named = load_config(overrides={"engine": {"device": "cuda"}})
    assert named.engine.max_step_tokens == GPU_CLASSES[-1].max_step_tokens
    assert named.kv.host_memory_bytes == Config().kv.host_memory_bytes
    assert load_config(overrides={"engine": {"device": "cuda"}}, machine=lambda: NO_GPU).on_gpu


def test_schedulers_get_the_devices_sizes() -> None:
    """The same builder serves workers and simulator."""
    scheduler = compose.iteration(load_config(preset="unified", machine=lambda: H200_BOX))
    held = {value for name, value in vars(scheduler).items() if isinstance(value, int)} | {
        getattr(limits, name)
        for limits in vars(scheduler).values()
        for name in getattr(type(limits), "__slots__", ())
        if isinstance(getattr(limits, name, None), int)
    }
    assert {8192, 2048, 1024} <= held


def test_a_gpu_worker_has_few_threads() -> None:
    config = load_config(machine=lambda: H200_BOX, overrides={"engine": {"device": "cuda"}})
    assert config.default_threads(192) == 8
    assert config.default_threads(4) == 2
