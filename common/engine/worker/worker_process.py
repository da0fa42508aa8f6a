"""A worker process from its start to its end: model, cache, device, links, machine, recording; then the worker loop.

Called by the worker services. Decides where the engine runs and how large the cache is; nothing about requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from cohort.common import paths
from cohort.common.addresses import MANAGER, bind_address, manager_names
from cohort.common.config import Config
from cohort.common.devices.cores import own_cores, usable_cores
from cohort.common.devices.degrees import check_divided
from cohort.common.devices.fit import check_host_fit, check_host_kv, host_need
from cohort.common.devices.host_memory import available_bytes
from cohort.common.engine.config.architecture import check_architecture
from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.config.lora_checkpoint import LoraOptions
from cohort.common.engine.config.model_config import kv_dtype, read_geometry
from cohort.common.engine.config.quantization_config import rounding_of
from cohort.common.engine.config.rank_shares import RankShare
from cohort.common.engine.config.runner_options import RunnerOptions
from cohort.common.engine.device.compiled_kernels import KernelBuild
from cohort.common.engine.device.device_name import device_name, native_bfloat16, resolve_dtype
from cohort.common.engine.ranks.followers import Followers
from cohort.common.engine.ranks.rank_hosts import RemoteRanks
from cohort.common.engine.ranks.rank_messages import Setup
from cohort.common.engine.ranks.rank_orders import OpenLinks
from cohort.common.engine.ranks.rank_transfers import opened
from cohort.common.engine.ranks.ranks import RankSettings
from cohort.common.engine.runner.draft_loading import load_draft, plan_draft
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.worker.crowded_cores import CrowdedCores
from cohort.common.engine.worker.devices import (
    WorkerDevice,
    checked_device,
    claim_device,
    engine_facts,
    engine_warnings,
    model_folder,
)
from cohort.common.engine.worker.engine_threads import device_of
from cohort.common.engine.worker.learned_state import LearnedState
from cohort.common.engine.worker.shared_cores import SharedCores
from cohort.common.engine.worker.timeline import Timeline, timeline_file
from cohort.common.engine.worker.worker_loop import WorkerLoop
from cohort.common.errors import ConfigError
from cohort.common.http import exposure
from cohort.common.kv.layer_groups import in_groups
from cohort.common.machines.recorder import WorkerHeader, config_text
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import WorkerSettings, WorkerSetup
from cohort.common.policies.interface import IterationScheduler
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.process import garbage
from cohort.common.process.guard import guarded
from cohort.common.process.recording import recorded
from cohort.common.process.service import ServiceContext
from cohort.common.tracing.observed import traced
from cohort.common.tracing.worker import WorkerSpans
from cohort.common.transport.kv_link import KvLink
from cohort.common.types import KvGeometry, Role, WorkerCapacity

_SWITCH_INTERVAL_S = 2e-4
"""Python's own is 5 ms, which is as long as a whole decode step may take."""


class WorkerPolicies(Protocol):
    """Source of a worker's policies: `common/policies/compose.py`, handed in by the service."""

    def check_names(self, config: Config) -> None: ...

    def iteration(self, config: Config) -> IterationScheduler: ...

    def allocation(self, config: Config, geometry: KvGeometry, num_blocks: int, host_blocks: int) -> KvAllocator: ...

    def moves_kv(self, config: Config) -> bool: ...

    def groups_layers(self, config: Config) -> bool: ...


def capacity_of(
    config: Config, role: Role, runner: ModelRunner, model: str, *, threads: int = 0, instance: str = ""
) -> WorkerCapacity:
    """Return the worker's capacity. `threads` of the worker; 0: one for every core."""
    geometry = runner.block_geometry
    num_blocks, cores = len(runner.kv.blocks), own_cores()
    longest = config.model.max_model_len or runner.geometry.max_positions
    return WorkerCapacity(
        role=role,
        model=model,
        max_model_len=min(longest, geometry.positions(num_blocks)),
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        dtype_bytes=geometry.dtype_bytes,
        block_size=geometry.block_size,
        num_blocks=num_blocks,
        host_blocks=len(runner.kv.host_blocks),
        max_rows=config.engine.max_rows,
        max_step_tokens=config.engine.max_step_tokens,
        device=device_name(runner.device, cores, threads=threads or len(cores), instance=instance),
        engine=engine_facts(runner),
        window=geometry.window,
        groups=geometry.groups,
    )


def load_runner(
    config: Config,
    threads: int,
    own: WorkerDevice | None = None,
    followers: Followers | None = None,
    instance: str = "",
    grouped: bool = False,
) -> ModelRunner:
    """Load model and cache as configured; the cache sized from what the device has. Raises `ConfigError`, `ModelError`.
    `own`: the device that the worker has claimed; None = it has the machine to itself. `followers`: its other ranks,
    which load their shares meanwhile; `threads` are each rank's. `grouped`: as in `ModelRunner`."""
    model_dir = model_folder(config)
    if not model_dir.is_dir():
        raise ConfigError(f"model.path: no folder {model_dir}; run scripts/setup or name a Hugging Face folder")
    device = checked_device(config) if own is None else own.device
    sharers = max(1, config.engine.workers_per_gpu) if own is None else own.sharers
    dtype = resolve_dtype(config.model.dtype, device)
    check_architecture(model_dir)
    whole = geometry = read_geometry(model_dir, config.model.quantization)
    degree = 1 if followers is None else followers.degree
    if degree > 1:
        check_divided(config, model_dir, geometry, degree)
        geometry = RankShare(geometry, 0, degree).own
    cache_dtype = kv_dtype(config.kv.cache_dtype, dtype, whole, device.type)
    block = geometry.kv_geometry(cache_dtype, config.kv.block_size)
    block_bytes = (in_groups(block, geometry.sliding_windows) if grouped else block).block_bytes * degree
    draft = plan_draft(config, model_dir, whole, dtype=dtype, device=device, degree=degree)
    memory_bytes = config.kv.memory_bytes
    num_blocks = 0
    if device.type == "cpu":
        wanted = host_need(config, model_dir, whole, computes_bfloat16=native_bfloat16())
        check_host_fit(config, model_dir.name, wanted, available_bytes(), 1)
        check_host_kv(config, wanted.weights, available_bytes(), 1)
        memory_bytes = config.kv.cpu_bytes
        num_blocks = memory_bytes // (block_bytes + (0 if draft is None else draft.block_bytes))
        if num_blocks < 2:
            raise ConfigError(
                f"kv.memory_bytes: {memory_bytes} bytes hold {num_blocks} blocks of {block_bytes} bytes; give it more"
            )
    shared = RunnerOptions(
        dtype=dtype,
        device=str(device),
        threads=threads,
        block_size=config.kv.block_size,
        num_blocks=num_blocks,
        host_blocks=config.kv.host_memory_bytes // block_bytes,
        max_rows=config.engine.max_rows,
        max_step_tokens=config.engine.max_step_tokens,
        max_context=config.model.max_model_len,
        weights=config.model.weights,
        cache_dtype=config.kv.cache_dtype,
        grouped=grouped,
        share=DeviceShare(
            config.kv.memory_fraction, sharers, memory_bytes // degree, config.engine.cuda_graph_memory_bytes
        ),
    )
    group = None
    if followers is not None and own is not None:
        setup = Setup(instance, 0, degree, followers.store, str(model_dir), shared, config.logging)
        group = _group(setup, followers, own)
    options = msgspec.structs.replace(
        shared,
        lora=LoraOptions(config.model.lora, config.engine.max_loras),
        rounding=rounding_of(config.model.quantization),
        batch_invariant=config.engine.batch_invariant,
    )
    if draft is not None:
        share = dataclasses.replace(shared.share, draft=draft.device_bytes, draft_block=draft.block_bytes)
        options = msgspec.structs.replace(options, share=share)
    runner = ModelRunner(model_dir, options, group, followers)
    if draft is not None:
        runner.drafter = load_draft(draft, config, runner)
    return runner


def _group(setup: Setup, followers: Followers, own: WorkerDevice) -> RankSettings:
    """Let the other ranks load their shares, each for a device of its own. Return rank 0's group."""
    devices = [str(device) for device, _ in own.others] + [""] * own.remote_ranks  # other hosts' ranks choose their own
    interface = "" if followers.remote is None else followers.remote.interface

    def of(rank: int) -> Setup:
        options = msgspec.structs.replace(setup.options, device=devices[rank - 1])
        return msgspec.structs.replace(setup, rank=rank, options=options, interface=interface)

    followers.set_up(of)
    return RankSettings(setup.rank, setup.degree, followers.place, followers.meet, followers.end, interface)


async def open_worker_links(
    context: ServiceContext, policies: WorkerPolicies, followers: Followers | None = None
) -> dict[str, KvLink]:
    """Return the configured links that all ranks have, best first; none if no KV ever moves. Raises `ConfigError`."""
    config = context.config
    if not policies.moves_kv(config):
        context.log.info("no KV links: this placement moves no KV", placement=config.policies.placement)
        return {}
    endpoint = _data_endpoint(context)
    order = OpenLinks(
        0,
        config.transfer.links,
        bind_address(endpoint, config.endpoints.bind_host),
        endpoint,
        str(config.security.curve_secret_key_file),
        config.transfer.plain_links_allowed,
        exposure.is_one_machine(config),
        config.transfer.ucx.tls,
        config.transfer.ucx.net_devices,
    )
    links = {link.name: link for link in opened(order)}
    if followers is None:
        return links
    order = msgspec.structs.replace(order, names=tuple(links))
    common = await followers.open_links(order, on_network=endpoint.startswith("tcp://"))
    for name in [name for name in links if name not in common]:
        context.log.warning("KV link left out: not every rank of this worker has it", link=name)
        await links.pop(name).close()
    if not links:
        raise ConfigError(f"transfer.links: none of {', '.join(config.transfer.links)} could be opened by every rank")
    return links


def _data_endpoint(context: ServiceContext) -> str:
    """Return where the fallback link listens: next to the worker's inbox."""
    worker = context.config.endpoints.worker
    if worker.startswith("tcp://"):
        return f"{worker.rpartition(':')[0]}:0"
    return f"ipc://{context.run_dir / context.instance}.kv.sock"


def _learned_state(
    context: ServiceContext, runner: ModelRunner, machine: WorkerMachine, threads: int, degree: int
) -> LearnedState | None:
    if machine.learned is None:
        return None
    config = context.config
    ranks = f"x{degree}" if degree > 1 else ""
    rounding = rounding_of(config.model.quantization)
    rounded = "" if rounding is None else f"-{rounding}"
    rounded += "" if runner.kv_dtype == runner.dtype else f"-kv-{runner.kv_dtype}"
    what = f"{context.model_name}-{runner.device}-{runner.dtype}{rounded}-{threads}{ranks}"
    kind, _, _ = context.instance.partition("-")
    learned = LearnedState(
        machine.learned,
        paths.state_dir(config.state.folder) / "learned",
        f"{what}-{context.instance}-{config.policies.iteration}",
        config.engine.profile,
        f"{what}-{kind}-*-{config.policies.iteration}",
    )
    context.log.info("step times", start=learned.load())
    return learned


async def load_ready_runner(
    config: Config,
    threads: int,
    own: WorkerDevice,
    engine: ThreadPoolExecutor,
    followers: Followers | None = None,
    instance: str = "",
    grouped: bool = False,
    cores: SharedCores | None = None,
) -> ModelRunner:
    """Load a runner that compiles nothing any more: warm, the copies of host slots included. Where others compute on
    the same cores it loads with one thread: each of their steps waits for the slower of the cores."""
    # What is batch-invariant is judged by the number of threads.
    crowded = cores is not None and not config.engine.batch_invariant and cores.share() < threads
    in_engine = asyncio.get_running_loop().run_in_executor
    # On a GPU only copies of host slots use the compiled kernels; a processor's weights need them while they load.
    kernels = KernelBuild() if own.device.type == "cuda" and config.kv.host_memory_bytes > 0 else None
    loading = 1 if crowded else threads
    runner = await in_engine(engine, load_runner, config, loading, own, followers, instance, grouped)
    await in_engine(engine, runner.warm_up)
    if crowded:
        runner.use_threads(threads)
    if kernels is not None:
        await kernels.ended()
    return runner


async def run_worker(context: ServiceContext, default_role: Role, policies: WorkerPolicies) -> None:
    """Run a worker process: load, serve, drain."""
    config = context.config
    policies.check_names(config)
    # The engine thread asks for the interpreter between two calls into torch: the event loop gives it up so soon.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # One thread does everything with torch, from loading on: OpenMP keeps a pool per calling thread, and with two pools
    # on the cores of one it stops spinning between two operators, which makes a step half as slow again.
    engine = ThreadPoolExecutor(1, thread_name_prefix="engine")
    own = await claim_device(config, context.instance, default_role, engine, context.stopping)
    if own is None:
        return  # asked to stop while every GPU was taken
    speculation = config.speculation.settled(own.device.type)
    context.config = config = msgspec.structs.replace(config, speculation=speculation)
    threads = config.worker_threads(context.instance, usable_cores())
    if own.degree == 1:
        await _serve(context, policies, own, engine, threads)
        return
    folder, remote = context.run_dir / f"{context.instance}.ranks", None
    if own.remote_ranks:
        remote = RemoteRanks(config, config.worker_group(context.instance, own.role), model_folder(config))
        context.log.info("awaiting ranks of other hosts", ranks=own.remote_ranks, endpoint=remote.endpoint)
    followers = Followers(own.degree, threads=max(1, threads // own.local_ranks), folder=folder, remote=remote)
    try:
        await _serve(context, policies, own, engine, threads, followers)
    finally:
        followers.close()


async def _serve(
    context: ServiceContext,
    policies: WorkerPolicies,
    own: WorkerDevice,
    engine: ThreadPoolExecutor,
    threads: int,
    followers: Followers | None = None,
) -> None:
    config, role = context.config, own.role
    started = time.monotonic()
    grouped = policies.groups_layers(config)
    cores, crowded = None, CrowdedCores(threads, own_cores())
    if own.device.type == "cpu" and followers is None:
        file, count = context.run_dir / "computing", usable_cores()
        cores = SharedCores(file, context.instance, threads=threads, cores=count, crowded=crowded)
    with contextlib.nullcontext() if cores is None else cores.computing():
        runner = await load_ready_runner(
            config, max(1, threads // own.local_ranks), own, engine, followers, context.instance, grouped, cores
        )
    if followers is not None:
        followers.watch(asyncio.get_running_loop())
    await asyncio.get_running_loop().run_in_executor(engine, runner.use_grammars)
    device = device_of(runner, cores)
    device.enter_loop()
    warnings = engine_warnings(runner, config, own.sharers)
    for warning in warnings:
        context.log.warning(warning)
    capacity = capacity_of(config, role, runner, context.model_name, threads=threads, instance=context.instance)
    links = await open_worker_links(context, policies, followers)
    scheduler = policies.iteration(config)
    kv = policies.allocation(config, capacity.geometry, capacity.num_blocks, capacity.host_blocks)
    capacity = msgspec.structs.replace(capacity, window=kv.geometry.window)  # some allocators give nothing back
    settings = WorkerSettings.of(config, tuple(links))
    setup = WorkerSetup(
        context.instance,
        context.incarnation,
        context.bus.endpoint,
        MANAGER,
        capacity,
        settings,
        manager_names(context.config)[1:],
    )
    seed = random.SystemRandom().getrandbits(53)
    machine = WorkerMachine(setup, scheduler, kv, random.Random(seed))
    learned = _learned_state(context, runner, machine, threads, own.degree)
    start = learned.imported if learned is not None else b""
    handler = recorded(context, machine, lambda: WorkerHeader(setup, seed, config_text(config), start))
    handler = traced(context, guarded(context, handler), WorkerSpans)
    loop = WorkerLoop(context, device, links, machine, handler, learned, engine)
    facts = msgspec.to_builtins(capacity.engine)
    context.facts = lambda: facts
    context.warnings = lambda: [*warnings, *filter(None, [crowded.warning()])]
    context.log.info(
        "worker ready",
        role=role.value,
        device=capacity.device,
        **{f"engine_{name}": fact for name, fact in facts.items()},
        threads=threads,
        seconds=round(time.monotonic() - started, 2),
        kv_blocks=capacity.num_blocks,
        max_model_len=capacity.max_model_len,
        dtype=runner.dtype,
    )
    file = timeline_file(context.run_dir, context.instance)
    Timeline(file, engine, context.log, on_gpu=own.device.type == "cuda").listen(asyncio.get_running_loop())
    garbage.freeze_heap()
    try:
        await loop.run()
    finally:
        engine.shutdown(wait=True)
