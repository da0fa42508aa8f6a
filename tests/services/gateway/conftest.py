"""A gateway on a live port over a memory bus, with a scripted cluster behind it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from cohort.common import paths
from cohort.common.clock import SystemClock
from cohort.common.config import (
    BatchConfig,
    Config,
    EndpointsConfig,
    GatewayConfig,
    KeysConfig,
    LoggingConfig,
    ModelConfig,
    ResponsesConfig,
    StateConfig,
)
from cohort.common.machines.gateway.gateway import GatewaySettings
from cohort.common.process.logs import configure_logging
from cohort.common.process.metrics import TOKEN_HEADER
from cohort.common.process.service import ServiceContext
from cohort.common.transport.memory_bus import MemoryNetwork
from cohort.common.types import Request
from cohort.services.gateway import bounds
from cohort.services.gateway.batches.batch_files import folder_of
from cohort.services.gateway.generation.answering import Outlet
from cohort.services.gateway.keys import keyring
from cohort.services.gateway.service import Gateway, load_model
from cohort.services.gateway.text import grammar_process, template_process
from cohort.services.gateway.text.bounded_process import BoundedProcess, Limits
from cohort.services.gateway.text.tokenizer import Tokenizer
from tests.services.gateway.cluster import Gate, Manager, Predictor, Script
from tests.services.gateway.tiny_model import write_model

ANSWER = "The quick brown fox wohnt in Köln 🦊 und 東京, 0123456789."


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


@pytest.fixture(scope="session")
def real_model_dir() -> Path:
    path = Path(os.environ.get("COHORT_TEST_MODEL") or paths.default_model_dir())
    if not (path / "tokenizer.json").is_file():
        pytest.skip(f"no model in {path}; run scripts/setup or set COHORT_TEST_MODEL")
    return path


@lru_cache(8)
def _process(module: str, about: bytes, limits: Limits, broken: str) -> BoundedProcess:
    return BoundedProcess(module, msgspec.json.decode(about), limits, broken)


def shared_process(module: str, about: Mapping[str, Any], limits: Limits, broken: str) -> BoundedProcess:
    """The process of the sites before that asked for one like it: it takes longer to start than all the rest."""
    return _process(module, msgspec.json.encode(about), limits, broken)


@dataclass
class Site:
    """What a test holds: the client's side and the cluster's side."""

    url: str
    session: aiohttp.ClientSession
    gateway: Gateway
    manager: Manager
    predictor: Predictor
    network: MemoryNetwork
    context: ServiceContext
    tokenizer: Tokenizer
    task: asyncio.Task[None] | None = None

    @property
    def batches(self) -> Path:
        """The folder of batches."""
        return folder_of(self.context.config, self.context.instance)

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream; the last one is the string [DONE]."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream"
            return parse_events(await response.read())

    async def monitors_metrics(self) -> str:
        """Metrics as the monitor gets them."""
        async with self.session.get(
            self.url + "/metrics", headers={TOKEN_HEADER: self.context.metrics_token}
        ) as response:
            return await response.text()

    async def ready(self) -> None:
        async with asyncio.timeout(5):
            while (await self.get("/ready"))[0] != 200:  # noqa: ASYNC110 -- over HTTP there is no event to wait for
                await asyncio.sleep(0.01)

    def nothing_left(self) -> bool:
        return not len(self.gateway.streams) and not self.manager.held()


def parse_events(data: bytes) -> list[Any]:
    assert data.endswith(b"\n\n"), data[-80:]
    events = []
    for line in data.decode().removesuffix("\n\n").split("\n\n"):
        assert line.startswith("data: "), line
        text = line.removeprefix("data: ")
        events.append(text if text == "[DONE]" else msgspec.json.decode(text))
    return events


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 -- the gateway has no events for its tests
            await asyncio.sleep(0.005)


OpenSite = Callable[..., Any]


@pytest.fixture
def open_site(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenSite:
    monkeypatch.setattr(keyring, "RELOAD_S", 1e-6)
    for each in (template_process, grammar_process):
        monkeypatch.setattr(each, "BoundedProcess", shared_process)
    settings_of = GatewaySettings.of

    @asynccontextmanager
    async def opened(
        script: Script | str = ANSWER,
        *,
        wait_ready: bool = True,
        with_manager: bool = True,
        with_predictor: bool = True,
        predictor_delay_s: float = 0.0,
        step_s: float = 0.0,
        model: Path = model_dir,
        instance: str = "gateway",
        state: dict[str, Any] | None = None,
        batch: dict[str, Any] | None = None,
        keys: dict[str, Any] | None = None,
        responses: dict[str, Any] | None = None,
        lora: dict[str, str] | None = None,
        settings: dict[str, Any] | None = None,
        drain_s: float = 1.0,
        limits: dict[str, Any] | None = None,
        **gateway_options: Any,
    ) -> AsyncIterator[Site]:
        options: dict[str, Any] = {"port": 0, **gateway_options}
        config = Config(
            model=ModelConfig(path=str(model), lora=lora or {}),
            gateway=GatewayConfig(**options),
            keys=KeysConfig(**(keys or {})),
            state=StateConfig(**{"folder": str(tmp_path), **(state or {})}),
            batch=BatchConfig(**(batch or {})),
            responses=ResponsesConfig(**(responses or {})),
            drain_s=drain_s,
            endpoints=EndpointsConfig(manager="memory://manager", predictor="memory://predictor"),
            logging=LoggingConfig(level="error"),
        )
        made = replace(settings_of(config), **{"predictor_wait_s": 0.2, **(settings or {})})
        monkeypatch.setattr(GatewaySettings, "of", lambda _: made)
        monkeypatch.setattr(bounds, "BOUNDS", bounds.Bounds(**(limits or {})))
        network = MemoryNetwork()
        card, tokenizer = load_model(config)
        answer = tokenizer.encode(script, special_tokens=False) if isinstance(script, str) else []

        def scripted(request: Request) -> list[int]:
            return [*answer, *card.eos_token_ids] if isinstance(script, str) else script(request)

        manager = Manager(network, scripted, step_s=step_s)
        predictor = Predictor(network, delay_s=predictor_delay_s)
        context = ServiceContext(
            config=config,
            instance=instance,
            role="gateway",
            incarnation=1,
            bus=network.bus("gateway"),
            log=configure_logging(config.logging, service="gateway", instance="gateway"),
            clock=SystemClock(),
            registry=CollectorRegistry(),
            run_dir=tmp_path,
            drain_s=1.0,
        )
        async with AsyncExitStack() as stack:
            tasks = []
            gateway = Gateway(context, card, tokenizer)
            if with_manager:
                tasks.append(asyncio.create_task(manager.run()))
            if with_predictor:
                tasks.append(asyncio.create_task(predictor.run()))
            serving = asyncio.create_task(gateway.run())
            await eventually(lambda: bool(context.metrics_url) or serving.done(), 30.0)
            if serving.done():
                serving.result()
            session = await stack.enter_async_context(aiohttp.ClientSession())
            site = Site(
                f"http://127.0.0.1:{gateway.port}",
                session,
                gateway,
                manager,
                predictor,
                network,
                context,
                tokenizer,
                serving,
            )
            try:
                if wait_ready and with_manager:
                    await site.ready()
                yield site
            finally:
                context.stopping.set()
                async with asyncio.timeout(10):
                    await serving
                for task in tasks:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task

    return opened


@pytest.fixture
async def site(open_site: OpenSite) -> AsyncIterator[Site]:
    async with open_site() as site:
        yield site
        await eventually(site.nothing_left)


@pytest.fixture
def handler_waits(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Returns once a handler waits for tokens and none is still to be written, however busy the machine is."""
    outlets: list[Outlet] = []
    made = Outlet.__init__

    def noted(self: Outlet) -> None:
        made(self)
        outlets.append(self)

    def writes() -> bool:
        return any(task.get_name() == "write streams" for task in asyncio.all_tasks())

    async def waits() -> None:
        async with asyncio.timeout(30):
            while not any(each.waits for each in outlets) or writes():  # noqa: ASYNC110 -- states of the product
                await asyncio.sleep(0.001)

    monkeypatch.setattr(Outlet, "__init__", noted)
    return waits
