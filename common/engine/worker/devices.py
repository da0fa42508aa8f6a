"""A worker's device: which GPU, by a claim, with how many sharers, what is refused before a byte is loaded.

Called by `worker_process`. `common/devices` has the rules; this module asks torch, and logs the choice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import platform
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import structlog
import torch

from cohort.common import paths
from cohort.common.config import Config
from cohort.common.devices import inventory
from cohort.common.devices.degrees import degree_of
from cohort.common.devices.division import divide, resolve_division, used_gpus
from cohort.common.devices.fit import check_fit, need
from cohort.common.devices.gpu_locks import DeviceClaims, Held, ShareRequest
from cohort.common.devices.refusal import TorchFacts, missing_toolchain, unusable_gpu
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.device.device_name import resolve_device
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.errors import ConfigError, NoDeviceLeft
from cohort.common.types import EngineFacts, Role
from cohort.kernels.cpu import native
from cohort.kernels.gpu import available
from cohort.kernels.gpu.attention.flash import prefill_attention_name

log = structlog.get_logger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0


@dataclass(frozen=True, slots=True)
class TorchGpu:
    index: int
    uuid: str
    name: str
    memory_bytes: int


class Claimed(NamedTuple):
    """Claimed GPU. `share`: held as long as this process lives."""

    gpu: TorchGpu
    share: Held


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """Worker's device and its part of it: 1 of `sharers`. `claim`: holds the share while the process lives."""

    device: torch.device
    role: Role
    sharers: int = 1
    claim: Held | None = None
    others: tuple[tuple[torch.device, Held | None], ...] = ()
    """Devices of the worker's other ranks on this host, with their claims; on a CPU all the same."""
    remote_ranks: int = 0

    @property
    def local_ranks(self) -> int:
        return 1 + len(self.others)

    @property
    def degree(self) -> int:
        return self.local_ranks + self.remote_ranks


def torch_facts() -> TorchFacts:
    complaint = ""
    works = torch.cuda.is_available()
    if not works and torch.version.cuda is not None:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            complaint = str(error).strip().partition("\n")[0]
    return TorchFacts(torch.__version__, torch.version.cuda or "", works, complaint)


def checked_device(config: Config) -> torch.device:
    """Return `engine.device` as torch knows it. Raises `ConfigError` rather than fall back to CPU or slow kernels."""
    if config.engine.device != "cpu" and (reason := unusable_gpu(config.engine.device, torch_facts())):
        raise ConfigError(reason)
    device = resolve_device(config.engine.device)
    if device.type == "cuda" and (reason := missing_toolchain()):
        raise ConfigError(reason)
    return device


def torch_gpus() -> list[TorchGpu]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(TorchGpu(index, str(properties.uuid), properties.name, properties.total_memory))
    return found


def model_folder(config: Config) -> Path:
    return Path(config.model.path) if config.model.path else paths.default_model_dir()


def worker_degree(config: Config, instance: str, role: Role) -> int:
    """Return the worker's number of ranks, as the launcher settles it. Raises `ConfigError`, `ModelError`."""
    group = config.worker_group(instance, role)
    model_dir = model_folder(config)
    if group.tensor_parallel == 1 or not model_dir.is_dir():
        return 1
    device = checked_device(config)
    memories = [gpu.memory_bytes for gpu in torch_gpus()] if device.type == "cuda" else []
    return degree_of(config, group, model_dir, read_geometry(model_dir), memories)


def candidates(config: Config, device: torch.device, gpus: list[TorchGpu], degree: int = 1) -> list[TorchGpu]:
    """Return the GPUs this worker may take: the one that the configuration names; else those that the model fits, if
    one worker's part is known. Raises `ConfigError` if it fits none."""
    if device.index is not None:
        gpus = [gpu for gpu in gpus if gpu.index == device.index]
    model_dir = model_folder(config)
    if not gpus or not model_dir.is_dir():
        return gpus  # `load_runner` says what is wrong
    wanted = need(config, model_dir, read_geometry(model_dir, config.model.quantization), degree)
    sharers = divide(config, len(gpus)).sharers
    fitting, refusal = [], None
    for gpu in sorted(gpus, key=lambda gpu: gpu.memory_bytes):
        try:
            check_fit(config, model_dir.name, wanted, gpu.name, gpu.memory_bytes, sharers)
        except ConfigError as error:
            refusal = error  # of the largest in the end
        else:
            fitting.append(gpu.index)
    if refusal is not None and not fitting:
        raise refusal
    if refusal is not None:
        log.warning("GPUs too small for the model are left out", reason=str(refusal))
    return [gpu for gpu in gpus if gpu.index in fitting]


def share_request(config: Config, instance: str, default_role: Role, visible: int) -> ShareRequest:
    """Return the share that this worker requests. One that the configuration does not name, as in a container, takes a
    role of its pipeline's plan, if roles are left to it (`workers: auto`)."""
    settled = resolve_division(config, visible)
    role: Role | tuple[Role, ...] = settled.instance_roles.get(instance, default_role)
    if config.divides and instance not in settled.instance_roles:
        role = tuple(settled.instance_roles.values())
    most = used_gpus(config, visible) if config.engine.gpus else 0
    return ShareRequest(divide(config, visible).sharers, instance, role, pipeline_id(config), most)


def pipeline_id(config: Config) -> str:
    """Return an id that only this pipeline's workers share: a hash of the manager's address and the cluster's key."""
    file = config.security.curve_secret_key_file
    key = Path(file).read_bytes() if file and Path(file).is_file() else b""
    identity = f"{config.endpoints.manager} {config.gateway.port}".encode()
    return hashlib.sha256(identity + key).hexdigest()[:16]


async def claim_device(
    config: Config, instance: str, default_role: Role, executor: Executor, stopping: asyncio.Event
) -> WorkerDevice | None:
    """Return the worker's device; on a GPU a share of one, for which it waits up to `engine.claim_wait_s`: the worker
    that this one replaces may still run. None if asked to stop meanwhile. Raises `ConfigError`, `NoDeviceLeft`. What
    asks torch runs in the engine's thread, so that the event loop goes on while CUDA starts."""
    in_engine = asyncio.get_running_loop().run_in_executor
    device = await in_engine(executor, checked_device, config)
    own_role = config.worker_role(instance, default_role)
    degree = await in_engine(executor, worker_degree, config, instance, own_role)
    local = max(1, degree // config.worker_group(instance, own_role).hosts)
    if device.type != "cuda":
        return WorkerDevice(device, own_role, others=((device, None),) * (local - 1), remote_ranks=degree - local)
    gpus = await in_engine(executor, torch_gpus)
    able = await in_engine(executor, candidates, config, device, gpus, degree)
    claims = DeviceClaims(Path(config.engine.claim_dir) if config.engine.claim_dir else paths.cache_dir() / "claims")
    request = share_request(config, instance, own_role, len(able))
    waited_s, pause_s, held = 0.0, _FIRST_PAUSE_S, take_together(claims, able, request, local)
    while not held:
        if waited_s >= config.engine.claim_wait_s:
            raise NoDeviceLeft(claims.why_not(able, request))
        if waited_s == 0.0:
            log.warning("waiting for a share of a GPU", longest_s=config.engine.claim_wait_s)
        pause_s = min(pause_s, config.engine.claim_wait_s - waited_s)
        try:
            await asyncio.wait_for(stopping.wait(), pause_s)
        except TimeoutError:
            waited_s, pause_s = waited_s + pause_s, min(2 * pause_s, _LONGEST_PAUSE_S)
            held = take_together(claims, able, request, local)
        else:
            return None
    for gpu, share in held:
        log.info(
            "device claimed",
            device=gpu.name,
            index=gpu.index,
            uuid=gpu.uuid,
            share=share.share,
            sharers=request.sharers,
            role=share.role.value,
        )
    (first, claim), *others = [(torch.device("cuda", gpu.index), share) for gpu, share in held]
    return WorkerDevice(first, claim.role, request.sharers, claim, tuple(others), degree - local)


def take_together(claims: DeviceClaims, gpus: Sequence[TorchGpu], request: ShareRequest, degree: int) -> list[Claimed]:
    """Return a share of each of `degree` GPUs, or none: two workers that held parts would wait for each other."""
    held: list[Claimed] = []
    if not isinstance(request.role, Role):  # every worker of the plan claims as often
        request = dataclasses.replace(request, role=tuple(request.role) * degree)
    while len(held) < degree:
        free = [gpu for gpu in gpus if all(gpu is not taken.gpu for taken in held)]
        share = claims.take(free, request)
        if share is None:
            for taken in held:
                taken.share.release()
            return []
        held.append(Claimed(free[share.gpu], share))
        request = dataclasses.replace(request, role=share.role)
    return held


def engine_facts(runner: ModelRunner) -> EngineFacts:
    """Return what computes here; decides on the kernels if no step has."""
    if runner.device.type != "cuda":
        own = native.implementation() if runner.dtype != "float16" else "reference"
        return EngineFacts(_ranks(runner) + processor_name(), "", runner.dtype, own, own, own)
    properties = torch.cuda.get_device_properties(runner.device)
    served = available.ops_for(torch.empty(0, device=runner.device)) is not None
    kernels = "triton" if served else "reference"
    return EngineFacts(
        _ranks(runner) + properties.name,
        f"{properties.major}.{properties.minor}",
        runner.dtype,
        kernels,
        ("triton, batch-invariant" if runner.batch_invariant else "triton split-KV") if served else "reference",
        _prefill_attention(runner, served=served),
    )


def _ranks(runner: ModelRunner) -> str:
    return "" if runner.ranks is None else f"{runner.ranks.share.degree} x "


def _prefill_attention(runner: ModelRunner, *, served: bool) -> str:
    """Return the kernel as `gpu/attention/prefill.py` chooses it: by dtype, head size (a model has one) and scores."""
    if not served:
        return "reference"
    g = runner.geometry
    if runner.batch_invariant:
        return "triton, batch-invariant"
    own_scores = g.attention_sinks or g.attention_softcap > 0
    if own_scores or runner.dtype == "float32" or g.head_dim % 8 or g.head_dim > 256:
        return "triton"
    return prefill_attention_name()


def engine_warnings(runner: ModelRunner, config: Config, sharers: int) -> list[str]:
    """Return what the GPU's owner would want to know and nothing fails for."""
    if runner.device.type != "cuda":
        return []
    warnings = []
    if config.engine.cuda_graph_memory_bytes and not runner.captured_batch_sizes:
        warnings.append(
            "decode steps are not recorded as CUDA graphs (the worker's log says why): "
            "every step is launched kernel by kernel"
        )
    if sharers > 1 and not inventory.mps_runs():
        warnings.append(
            f"{sharers} workers share this GPU without MPS: they take turns instead of running at once "
            "(docs/guide/gpu.md)"
        )
    return warnings


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
