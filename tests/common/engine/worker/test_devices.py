"""A worker's choice of a device, with torch's GPUs replaced by a list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cohort.common.config import Config, load_config
from cohort.common.devices import inventory
from cohort.common.devices.gpu_locks import DeviceClaims, ShareRequest
from cohort.common.devices.refusal import TorchFacts
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.worker import devices, worker_process
from cohort.common.engine.worker.devices import (
    TorchGpu,
    WorkerDevice,
    claim_device,
    engine_facts,
    engine_warnings,
    share_request,
    take_together,
)
from cohort.common.errors import ConfigError, ModelError, NoDeviceLeft
from cohort.common.types import Role
from tests.common.devices.fakes import GIB, host
from tests.engine_models import make_runner


def cards(count: int, gib: int = 80) -> list[TorchGpu]:
    return [TorchGpu(index, f"{index:08x}-0000", "NVIDIA H100", gib * GIB) for index in range(count)]


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes torch have these GPUs."""

    def made(count: int, index: int | None = None) -> None:
        monkeypatch.setattr(devices, "torch_gpus", lambda: cards(count))
        monkeypatch.setattr(devices, "checked_device", lambda config: torch.device("cuda", index))

    return made


def configured(tmp_path: Path, preset: str = "cohort", **options: Any) -> Config:
    engine = {"device": "cuda", "claim_dir": str(tmp_path / "claims"), "claim_wait_s": 0.0, **options.pop("engine", {})}
    model = {"path": str(tmp_path / "no-model")}
    return load_config(preset=preset, overrides={"engine": engine, "model": model, **options})


def started(config: Config, instance: str, default: Role, *, stopping: bool = False) -> WorkerDevice | None:
    """One worker as far as its claim."""

    async def run() -> WorkerDevice | None:
        event = asyncio.Event()
        if stopping:
            event.set()
        with ThreadPoolExecutor(1) as executor:
            return await claim_device(config, instance, default, executor, event)

    return asyncio.run(run())


def test_workers_of_containers_spread_over_the_gpus_and_the_one_too_many_says_why(tmp_path: Path, box: Any) -> None:
    """Container names are in no configuration; once every one of them was worker 0 on GPU 0."""
    box(4)
    config = configured(tmp_path, workers="auto")
    taken = [started(config, f"worker-{name}", Role.PREFILL) for name in ("a1f", "b2e", "c3d", "d4c")]
    assert [each.device.index for each in taken if each is not None] == [0, 1, 2, 3]
    assert {(each.sharers, each.role) for each in taken if each is not None} == {(1, Role.UNIFIED)}
    with pytest.raises(NoDeviceLeft, match=r"worker-a1f \(1 of 1\).*Run fewer workers"):
        started(config, "worker-e5b", Role.PREFILL)


def test_workers_of_containers_take_the_roles_of_the_plan(tmp_path: Path, box: Any) -> None:
    box(4)
    config = configured(tmp_path, preset="disaggregated", workers="auto")
    taken = [started(config, f"worker-{name}", Role.PREFILL) for name in "abcd"]
    roles = [each.role for each in taken if each is not None]
    assert roles == [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]


def test_sharers_are_planned_before_memory_is_divided(tmp_path: Path, box: Any) -> None:
    box(1)
    config = configured(tmp_path, preset="disaggregated")
    for instance in ("prefill-0", "decode-0"):
        own = started(config, instance, Role.UNIFIED)
        assert own is not None and own.sharers == 2
        assert own.role is config.instance_roles[instance]
    with pytest.raises(NoDeviceLeft):
        started(config, "decode-1", Role.DECODE)


def test_ranks_of_a_worker_claim_a_gpu_each_or_none(tmp_path: Path) -> None:
    claims, three = DeviceClaims(tmp_path), cards(3)
    first = take_together(claims, three, ShareRequest(1, "decode-0", Role.DECODE), 2)
    assert len({gpu.index for gpu, _ in first}) == 2
    assert take_together(claims, three, ShareRequest(1, "decode-1", Role.DECODE), 2) == []
    assert sum(len(claims.claims(gpu.uuid)) for gpu in three) == 2, "the one that it found is free again"
    for _, share in first:
        share.release()
    assert len(take_together(claims, three, ShareRequest(1, "decode-1", Role.DECODE), 2)) == 2


def test_workers_of_several_ranks_take_the_roles_of_the_plan(tmp_path: Path) -> None:
    claims, four = DeviceClaims(tmp_path), cards(4)
    wish = ShareRequest(1, "worker", (Role.PREFILL, Role.DECODE))
    roles = [[share.role for _, share in take_together(claims, four, wish, 2)] for _ in range(2)]
    assert roles == [[Role.PREFILL] * 2, [Role.DECODE] * 2]


def test_a_gpu_that_is_named_is_taken_and_no_other(tmp_path: Path, box: Any) -> None:
    box(4, index=2)
    config = configured(tmp_path, engine={"device": "cuda:2"}, workers=[{"role": "unified"}])
    own = started(config, "unified-0", Role.UNIFIED)
    assert own is not None and (own.device, own.sharers) == (torch.device("cuda", 2), 1)
    with pytest.raises(NoDeviceLeft):
        started(config, "unified-1", Role.UNIFIED)


def test_a_share_that_comes_free_is_waited_for(tmp_path: Path, box: Any) -> None:
    box(1)
    config = configured(tmp_path, engine={"claim_wait_s": 60.0}, workers="auto")
    first = started(config, "old", Role.UNIFIED)
    assert first is not None and first.claim is not None

    async def follow() -> WorkerDevice | None:
        with ThreadPoolExecutor(1) as executor:
            task = asyncio.create_task(claim_device(config, "new", Role.UNIFIED, executor, asyncio.Event()))
            await asyncio.sleep(0.05)
            assert not task.done()
            first.claim.release()  # type: ignore[union-attr]
            return await task

    second = asyncio.run(follow())
    assert second is not None and second.device.index == 0
    assert started(config, "third", Role.UNIFIED, stopping=True) is None  # asked to end while it waits


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    tmp_path: Path, box: Any, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    box(2)
    config = load_config(overrides={**_claims(tmp_path), "model": {"path": str(model_folder("llama"))}})
    assert started(config, "unified-0", Role.UNIFIED) is not None
    monkeypatch.setattr(devices, "torch_gpus", lambda: cards(2, gib=1))
    with pytest.raises(ConfigError, match=r"does not fit NVIDIA H100.*1\.2 GiB too much"):
        started(config, "unified-1", Role.UNIFIED)


def _claims(tmp_path: Path) -> dict[str, Any]:
    return {"engine": {"device": "cuda", "claim_dir": str(tmp_path / "claims"), "claim_wait_s": 0.0}}


def test_only_the_pipelines_own_number_of_gpus(tmp_path: Path) -> None:
    config = configured(tmp_path, workers="auto", engine={"gpus": 2})
    wish = share_request(config, "worker-a", Role.PREFILL, 8)
    assert (wish.most_gpus, wish.sharers, wish.role) == (2, 1, (Role.UNIFIED, Role.UNIFIED))


def test_no_gpu_is_ever_silently_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "torch_facts", lambda: TorchFacts("2.13.0", "13.0", works=False))
    present = host(tmp_path, driver="550.54.15", nodes=["nvidiactl"])
    monkeypatch.setattr(inventory.driver_present, "__defaults__", (present,))
    monkeypatch.setattr(inventory.driver_version, "__defaults__", (present,))
    monkeypatch.setattr(devices.unusable_gpu, "__defaults__", (present,))
    with pytest.raises(ConfigError, match=r"needs driver 580\.65\.06"):
        devices.checked_device(Config())
    cpu = load_config(overrides={"engine": {"device": "cpu"}})
    assert devices.checked_device(cpu) == torch.device("cpu")


def test_missing_tools_are_refused_on_a_gpu_before_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_facts", lambda: TorchFacts("2.13.0", "13.0", works=True))
    monkeypatch.setattr(devices, "resolve_device", lambda name: torch.device(name))
    monkeypatch.setattr(devices, "missing_toolchain", lambda: "no Python.h for the GPU kernels")
    with pytest.raises(ConfigError, match=r"no Python\.h"):
        devices.checked_device(load_config(overrides={"engine": {"device": "cuda"}}))
    assert devices.checked_device(load_config(overrides={"engine": {"device": "cpu"}})).type == "cpu"


class Runner:
    """As much of a runner on a GPU as the warnings ask of it."""

    device = torch.device("cuda", 0)
    ranks = None

    def __init__(self, classes: tuple[int, ...], family: str = "llama") -> None:
        self.captured_batch_sizes = classes
        self.geometry = type("Geometry", (), {"family": family})


def test_what_an_owner_should_know_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    config = Config()

    def told(runner: Any, sharers: int = 1) -> list[str]:
        return engine_warnings(runner, config, sharers)

    assert told(Runner((1, 2, 4))) == []
    assert "not recorded as CUDA graphs" in told(Runner(()))[0] and "log says why" in told(Runner(()))[0]
    assert "2 workers share this GPU without MPS" in told(Runner((1,)), 2)[0]
    (tmp_path / "control").touch()
    assert told(Runner((1,)), 2) == []


def test_a_worker_on_a_processor_says_what_computes(model_folder: Callable[[str], Path]) -> None:
    runner = make_runner(model_folder("llama"))
    facts = engine_facts(runner)
    assert facts.device and facts.capability == "" and facts.dtype == "float32"
    assert facts.kernels == facts.decode_attention in ("native", "reference")
    assert runner.captured_batch_sizes == () and engine_warnings(runner, Config(), 2) == []


def test_a_worker_on_a_processor_looks_at_its_memory_before_it_reads(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("llama")
    monkeypatch.setattr(worker_process, "available_bytes", lambda: 100_000)
    config = load_config(overrides={"model": {"path": str(folder)}, "engine": {"device": "cpu"}})
    with pytest.raises(ConfigError, match=rf"{folder.name} does not fit this host: needs .* for weights.* too much; "):
        worker_process.load_runner(config, 1)
    monkeypatch.setattr(worker_process, "available_bytes", lambda: 0)  # not known
    settings = {"model": {"path": str(folder), "quantization": "fp8"}, "engine": {"device": "cpu"}}
    with pytest.raises(ModelError, match="its weights are plain"):
        worker_process.load_runner(load_config(overrides=settings), 1)


@pytest.mark.parametrize(
    ("name", "dtype", "told"),
    [
        ("llama", "bfloat16", "flash"),
        ("llama", "float32", "triton"),
        ("gpt-oss", "bfloat16", "triton"),
        ("gemma2", "bfloat16", "triton"),
        ("gemma2-uncapped", "bfloat16", "flash"),
    ],
)
def test_what_attends_to_prompts_is_told(
    name: str, dtype: str, told: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks and soft caps are not given to flash attention, and nothing where a position is to keep its bits."""
    monkeypatch.setattr(devices, "prefill_attention_name", lambda: "flash")
    runner = SimpleNamespace(dtype=dtype, geometry=read_geometry(model_folder(name)), batch_invariant=False)
    assert devices._prefill_attention(cast(ModelRunner, runner), served=True) == told
    assert devices._prefill_attention(cast(ModelRunner, runner), served=False) == "reference"
    runner.batch_invariant = True
    assert devices._prefill_attention(cast(ModelRunner, runner), served=True) == "triton, batch-invariant"
