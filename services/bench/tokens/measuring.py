"""One measurement: processes up, streams running, processor time before and after a stretch of it.

Called by `command.py`. Tokens are counted by the clients, so a token that no client was sent costs the others.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cohort.common.config import Config, load_config, nested
from cohort.common.http.ports import free_port
from cohort.common.paths import default_model_dir
from cohort.services.bench.tokens.clients import Clients
from cohort.services.bench.tokens.processes import Processes, started
from cohort.services.launcher.options import assigned_by
from cohort.services.launcher.plan import resolve

_SETTLE_S = 1.0
"""Between the last stream's first tokens and the first look at the clocks."""
_BEGIN_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """`tokens_per_s` is what the engines make of it together: a step of a worker lasts as long as that needs."""

    streams: int
    tokens_per_s: float
    seconds: float
    workers: int
    gateways: int
    resumable: bool = False

    @property
    def step_s(self) -> float:
        return self.streams / self.tokens_per_s

    @property
    def output_tokens(self) -> int:
        """More than any stream is sent before the measurement ends."""
        return int((_BEGIN_TIMEOUT_S + _SETTLE_S + self.seconds) / self.step_s) + 16


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of processor time per token, of all processes of a kind together."""

    streams: int
    workers: int
    gateways: int
    resumable: bool
    tokens: int
    tokens_per_s: float
    tokens_per_read: float
    bytes_per_token: float
    gateway_us: float
    worker_us: float
    bus_us: float
    manager_us: float
    predictor_us: float
    engine_us: float

    @property
    def path_us(self) -> float:
        """What every token takes: worker loop, bus, gateway."""
        return self.gateway_us + self.worker_us + self.bus_us


def measure(preset: str, settings: Sequence[str], model: str, load: Load) -> Cost:
    """Raises `MeasurementFailed`, `ConfigError`."""
    with tempfile.TemporaryDirectory(prefix="cohort-bench-") as name:
        folder = Path(name)
        config = configured(preset, settings, model, load, folder)
        with started(config, folder, load.step_s) as processes:
            processes.wait_ready()
            return asyncio.run(_measured(config, processes, load))


async def _measured(config: Config, processes: Processes, load: Load) -> Cost:
    name = config.model.served_name or Path(config.model.path).name
    clients = await Clients.open(
        "127.0.0.1", config.gateway.port, name, load.streams, load.output_tokens, resumable=load.resumable
    )
    try:
        await clients.all_running(_BEGIN_TIMEOUT_S)
        await asyncio.sleep(_SETTLE_S)
        loop = asyncio.get_running_loop()
        before, began_s = processes.times(), loop.time()
        counted = clients.counts()
        await asyncio.sleep(load.seconds)
        after, ended_s = processes.times(), loop.time()
        clients.check()
        tokens, reads, nbytes = (now - then for now, then in zip(clients.counts(), counted, strict=True))
    finally:
        clients.close()
    spent = {instance: times.since(before[instance]) for instance, times in after.items()}

    workers = [times for name, times in spent.items() if name in config.instance_roles]
    gateways = [times for name, times in spent.items() if name.startswith("gateway")]

    def us(seconds: Iterable[float]) -> float:
        return 1e6 * sum(seconds) / tokens

    return Cost(
        streams=load.streams,
        workers=load.workers,
        gateways=load.gateways,
        resumable=load.resumable,
        tokens=tokens,
        tokens_per_s=tokens / (ended_s - began_s),
        tokens_per_read=tokens / max(1, reads),
        bytes_per_token=nbytes / tokens,
        gateway_us=us(times.loop_s + times.other_s for times in gateways),
        worker_us=us(times.loop_s for times in workers),
        bus_us=us(times.bus_s for times in (*workers, *gateways)),
        manager_us=us([spent["manager"].whole_s]),
        predictor_us=us([spent["predictor"].whole_s]),
        engine_us=us(times.other_s for times in workers),
    )


def configured(preset: str, settings: Sequence[str], model: str, load: Load, folder: Path) -> Config:
    """Rows for all streams on any worker; nothing of it is written outside of `folder`."""
    flat = {
        "gateway.port": 0,
        "gateway.resume_file": str(folder / "streams.sqlite"),
        "keys.usage_file": str(folder / "usage.sqlite"),
        "monitor.port": 0,
        "metrics.base_port": 0,
        "predictor.state_path": str(folder / "lengths.npz"),
        "batch.folder": str(folder / "batches"),
        "engine.max_rows": max(64, load.streams),
        "drain_s": 0.1,
        "workers": [{"role": "unified", "count": load.workers, "threads": 1}],
    }
    if load.gateways > 1:
        flat["gateway.processes"] = load.gateways
    config = load_config(preset=preset, overrides=nested({**flat, **assigned_by(settings)}, "--set"))
    path = Path(model).expanduser() if model else default_model_dir()
    return resolve(config, model=path, cores=1, free_port=free_port)
