"""A request's `model` may name a LoRA adapter, in every API; answers and lists say so, and so do logs and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cohort.common.config import ModelConfig
from cohort.common.errors import ModelError
from cohort.services.gateway.requests.model_card import read_model_card
from tests.services.gateway.batch_client import begin, client_of, ended, job
from tests.services.gateway.conftest import OpenSite, Site

LORA = {"team/sql": "/adapters/sql-3", "poems": "/adapters/poems"}
CHAT = [{"role": "user", "content": "hi"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4},
}


def adapters_submitted(site: Site) -> set[str]:
    found = {request.adapter for request in site.manager.submitted}
    site.manager.submitted.clear()
    return found


@pytest.mark.parametrize("path", CALLS)
async def test_the_model_of_a_request_selects_its_adapter(open_site: OpenSite, path: str) -> None:
    async with open_site(lora=LORA) as site:
        for name, adapter in (("team/sql", "team/sql"), ("poems", "poems"), ("tiny", "")):
            status, body = await site.post(path, {**CALLS[path], "model": name})
            assert (status, body["model"]) == (200, name)
            assert adapters_submitted(site) == {adapter}
        status, body = await site.post(path, {**CALLS[path], "model": "prose"})
        assert status == 404
        assert "prose does not exist; this server serves tiny, team/sql, poems." in body["error"]["message"]
        assert adapters_submitted(site) == set()


async def test_streams_name_it_and_every_choice_has_it(open_site: OpenSite) -> None:
    async with open_site(lora=LORA) as site:
        events = await site.stream("/v1/completions", {"model": "poems", "prompt": "x", "n": 3, "max_tokens": 4})
        assert {event["model"] for event in events[:-1]} == {"poems"}
        assert [request.adapter for request in site.manager.submitted] == ["poems"] * 3


async def test_lists(open_site: OpenSite) -> None:
    async with open_site(lora=LORA) as site:
        base, sql, poems = (await site.get("/v1/models"))[1]["data"]
        assert (base["id"], base["parent"]) == ("tiny", None)
        assert (sql["id"], sql["parent"], sql["root"]) == ("team/sql", "tiny", "sql-3")
        assert await site.get("/v1/models/team/sql") == (200, sql)
        assert await site.get("/v1/models/poems") == (200, poems)
        status, body = await site.get("/v1/models/prose")
        assert (status, "tiny, team/sql, poems" in body["error"]["message"]) == (404, True)


async def test_lines_of_a_batch(open_site: OpenSite) -> None:
    async with open_site(lora=LORA) as site:
        bodies = [{**CALLS["/v1/completions"], "model": name} for name in ("poems", "tiny", "prose")]
        async with client_of(site) as client:
            batch = await ended(client, await begin(client, job(*bodies)))
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
        assert adapters_submitted(site) == {"poems", ""}


async def test_metrics_count_requests_by_adapter(open_site: OpenSite) -> None:
    async with open_site(lora=LORA) as site:
        for name in ("poems", "poems", "tiny"):
            await site.post("/v1/completions", {**CALLS["/v1/completions"], "model": name})
        async with site.session.get(site.url + "/metrics") as response:
            text = await response.text()
        counted = [line for line in text.splitlines() if line.startswith("cohort_lora_requests_total{")]
        assert counted == ['cohort_lora_requests_total{adapter="poems",instance="gateway",model_name="tiny"} 2.0']


def test_an_adapter_may_not_have_the_base_models_name(model_dir: Path) -> None:
    for name in ("tiny", str(model_dir.resolve())):
        with pytest.raises(ModelError, match="is the base model's name"):
            read_model_card(ModelConfig(path=str(model_dir), lora={name: "/adapters/a"}))


def test_a_message_names_so_many_adapters_at_most(model_dir: Path) -> None:
    many = {f"a{index}": "/adapters/a" for index in range(30)}
    card = read_model_card(ModelConfig(path=str(model_dir), lora=many))
    assert card.listed.endswith("`a14` and 15 more")
    assert card.adapter_of("a29") == "a29" and card.adapter_of("tiny") == card.adapter_of(None) == ""
    assert msgspec.convert({"path": "p", "lora": {"a": "b"}}, ModelConfig).lora == {"a": "b"}
