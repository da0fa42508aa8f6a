"""Adapters added and removed while the server runs: who may, what clients see, what workers are sent, what stays."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cohort.common.engine.config.lora_checkpoint import read_added
from cohort.common.engine.config.model_config import read_geometry
from cohort.common.errors import ModelError
from cohort.common.keys.key_file import editing, new_key
from tests.e2e.tiny_models import qwen2, save
from tests.lora_adapters import save_adapter
from tests.services.gateway.conftest import OpenSite, Site, eventually
from tests.services.gateway.tiny_model import byte_level

LOAD, UNLOAD, ASK = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("added") / "base"
    save(qwen2(), folder)
    byte_level(400).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def adapter(base: Path) -> Path:
    return save_adapter(base, base.parent / "sql", seed=1)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """Arguments of a site with the keys of `operator` and `client`, whose headers come with it."""
    path, headers = tmp_path / "keys.json", {}
    for name, admin in (("operator", True), ("client", False)):
        with editing(path) as held:
            held[0], _, secret = new_key(held[0], name, 1, admin=admin)
            headers[name] = {"Authorization": f"Bearer {secret}"}
    return {"file": str(path), **headers}


class Operated:
    """A site, asked by its operator or one of its clients."""

    def __init__(self, site: Site, keys: dict[str, Any]) -> None:
        self.site = site
        self.keys = keys

    async def post(self, path: str, who: str = "operator", **body: Any) -> tuple[int, Any]:
        async with self.site.session.post(self.site.url + path, json=body, headers=self.keys[who]) as response:
            whole = response.content_type == "application/json"
            return response.status, await response.json() if whole else await response.text()

    async def ask(self, model: str) -> int:
        status, _ = await self.post(ASK, "client", model=model, prompt="x", max_tokens=2)
        return status

    async def listed(self) -> list[str]:
        _, models = await self.site.get("/v1/models", headers=self.keys["client"])
        return [each["id"] for each in models["data"]]


@pytest.fixture
async def operated(open_site: OpenSite, base: Path, keys: dict[str, Any]) -> AsyncIterator[Operated]:
    async with open_site(model=base, keys={"file": keys["file"]}) as site:
        yield Operated(site, keys)


async def test_added_asked_listed_and_removed(operated: Operated, adapter: Path) -> None:
    assert await operated.ask("sql") == 404
    status, text = await operated.post(LOAD, lora_name="sql", lora_path=str(adapter))
    assert (status, text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert await operated.listed() == ["base", "sql"]
    assert await operated.ask("sql") == 200
    (request,) = operated.site.manager.submitted
    assert request.adapter.startswith("sql@") and request.adapter_name == "sql"
    assert request.adapter_folder == str(adapter)
    status, text = await operated.post(UNLOAD, lora_name="sql", lora_int_id=1)
    assert (status, text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert await operated.listed() == ["base"] and await operated.ask("sql") == 404


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_only_an_operators_key(
    open_site: OpenSite, operated: Operated, adapter: Path, tmp_path: Path, path: str
) -> None:
    body = {"lora_name": "sql", "lora_path": str(adapter)} if path == LOAD else {"lora_name": "sql"}
    status, answer = await operated.post(path, "client", **body)
    assert (status, answer["error"]["type"]) == (403, "permission_error")
    assert (await operated.site.post(path, body))[0] == 401
    async with open_site(state={"folder": str(tmp_path / "other")}) as open_to_all:
        status, answer = await open_to_all.post(path, body)
        assert status == 403 and "--admin" in answer["error"]["message"]
    assert await operated.listed() == ["base"]


async def test_what_is_refused(operated: Operated, adapter: Path, base: Path) -> None:
    other = save_adapter(base, base.parent / "wide", seed=2, rank=65)
    for path, body, status, param, says in (
        (LOAD, {"lora_name": "sql"}, 400, "lora_path", "missing"),
        (LOAD, {"lora_name": "sql", "lora_path": "sql"}, 400, "lora_path", "absolute"),
        (LOAD, {"lora_name": "sql", "lora_path": "/nowhere"}, 400, "lora_path", "no folder"),
        (LOAD, {"lora_name": "sql", "lora_path": str(other)}, 400, "lora_path", "at most 64"),
        (LOAD, {"lora_name": " ", "lora_path": str(adapter)}, 400, "lora_path", "no name"),
        (LOAD, {"lora_name": "base", "lora_path": str(adapter)}, 400, "lora_name", "configuration"),
        (UNLOAD, {"lora_name": "sql"}, 404, "lora_name", "cannot be found"),
    ):
        given, answer = await operated.post(path, **body)
        assert (given, answer["error"]["param"]) == (status, param), answer
        assert says in answer["error"]["message"]
    await operated.post(LOAD, lora_name="sql", lora_path=str(adapter))
    given, answer = await operated.post(LOAD, lora_name="sql", lora_path=str(adapter))
    assert given == 400 and "already been loaded" in answer["error"]["message"]


async def test_a_request_keeps_the_adapter_that_it_began_with(operated: Operated, adapter: Path, base: Path) -> None:
    other, gate, site = save_adapter(base, base.parent / "sql-2", seed=3), asyncio.Event(), operated.site
    await operated.post(LOAD, lora_name="sql", lora_path=str(adapter))
    site.manager.gate = gate.wait
    begun = asyncio.create_task(operated.ask("sql"))
    await eventually(lambda: len(site.manager.submitted) == 1)
    assert (await operated.post(LOAD, lora_name="sql", lora_path=str(other), load_inplace=True))[0] == 200
    later = asyncio.create_task(operated.ask("sql"))
    await eventually(lambda: len(site.manager.submitted) == 2)
    assert (await operated.post(UNLOAD, lora_name="sql"))[0] == 200
    gate.set()
    assert (await begun, await later) == (200, 200)
    first, second = site.manager.submitted
    assert (first.adapter_folder, second.adapter_folder) == (str(adapter), str(other))
    assert first.adapter != second.adapter and first.cache_salt != second.cache_salt


async def test_a_gateway_that_starts_again_has_them(
    open_site: OpenSite, base: Path, adapter: Path, keys: dict[str, Any]
) -> None:
    gone = shutil.copytree(adapter, adapter.parent / "gone")
    async with open_site(model=base, keys={"file": keys["file"]}) as site:
        for name, folder in (("sql", adapter), ("gone", gone)):
            assert (await Operated(site, keys).post(LOAD, lora_name=name, lora_path=str(folder)))[0] == 200
    shutil.rmtree(gone)
    async with open_site(model=base, keys={"file": keys["file"]}) as site:
        assert await Operated(site, keys).listed() == ["base", "sql"], "what is gone is logged, and not served"
        assert await Operated(site, keys).ask("sql") == 200


async def test_an_adapter_of_the_configuration_stays(
    open_site: OpenSite, base: Path, adapter: Path, keys: dict[str, Any]
) -> None:
    async with open_site(model=base, lora={"poems": str(adapter)}, keys={"file": keys["file"]}) as site:
        for path, body in ((LOAD, {"lora_path": str(adapter)}), (UNLOAD, {})):
            status, answer = await Operated(site, keys).post(path, lora_name="poems", **body)
            assert (status, answer["error"]["param"]) == (400, "lora_name")


async def test_workers_take_the_file_that_was_added_and_no_other(
    operated: Operated, base: Path, adapter: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(adapter, tmp_path / "changing")
    await operated.post(LOAD, lora_name="sql", lora_path=str(folder))
    await operated.ask("sql")
    (request,) = operated.site.manager.submitted
    geometry = read_geometry(base)
    assert read_added(request.adapter, folder, geometry).name == request.adapter
    (folder / "adapter_model.safetensors").touch()
    with pytest.raises(ModelError, match="has changed since it was added"):
        read_added(request.adapter, folder, geometry)
