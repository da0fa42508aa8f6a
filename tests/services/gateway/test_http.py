"""Everything around generation: probes, keys, errors, and whatever bytes a stranger sends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cohort
from cohort.common.errors import ConfigError
from cohort.services.gateway.generation.streams import Streams
from cohort.services.gateway.keys.middleware import resolve_keys
from tests.examples import examples
from tests.services.gateway.conftest import OpenSite, Site

ASK = {"prompt": "x", "max_tokens": 4}


async def test_probes(site: Site) -> None:
    assert await site.get("/health") == (200, {"status": "ok"})
    assert await site.get("/ready") == (200, {"ready": True})
    status, body = await site.get("/version")
    assert (status, body["version"], body["preset"]) == (200, cohort.__version__, "cohort")
    assert body["engines"] == [{"device": "NVIDIA H200", "capability": "9.0", "kernels": "triton"}]


async def test_models(site: Site) -> None:
    status, body = await site.get("/v1/models")
    assert (status, body["object"]) == (200, "list")
    [model] = body["data"]
    assert set(model) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"}
    assert (model["id"], model["object"], model["max_model_len"], model["parent"]) == ("tiny", "model", 512, None)
    assert await site.get("/v1/models/tiny") == (200, model)
    assert await site.get("/v1/models/" + model["root"]) == (200, model)
    assert (await site.get("/v1/models/gpt-9"))[0] == 404


async def test_workers_with_less_room_bound_the_context(open_site: OpenSite) -> None:
    async with open_site() as site:
        site.manager.load = msgspec.structs.replace(site.manager.load, max_model_len=64)
        async with asyncio.timeout(5):
            while (await site.get("/v1/models"))[1]["data"][0]["max_model_len"] != 64:  # noqa: ASYNC110 -- over HTTP there is no event
                await asyncio.sleep(0.01)
        status, body = await site.post("/v1/completions", {"prompt": [5] * 60, "max_tokens": 8})
        assert (status, "64 tokens" in body["error"]["message"]) == (400, True)


async def test_metrics_are_prometheus_text(site: Site) -> None:
    await site.post("/v1/completions", ASK)
    async with site.session.get(site.url + "/metrics") as response:
        text = await response.text()
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    for line in (
        'cohort_request_success_total{class="rt",finished_reason="length",instance="gateway",model_name="tiny"} 1.0',
        'cohort_generation_tokens_total{class="rt",instance="gateway",model_name="tiny"} 4.0',
        'cohort_time_to_first_token_seconds_count{class="rt",instance="gateway",model_name="tiny"} 1.0',
        'cohort_inter_token_latency_seconds_count{class="rt",instance="gateway",model_name="tiny"} 3.0',
        'cohort_ttft_stage_seconds_count{class="rt",instance="gateway",model_name="tiny",stage="prefill"} 1.0',
        'cohort_slo_requests_total{class="rt",instance="gateway",model_name="tiny",objective="ttft",outcome="met"} 1.0',
    ):
        assert line in text
    stats = site.context.stats()
    assert (stats["finished_total"], stats["generation_tokens_total"], stats["open_streams"]) == (1, 4, 0)


async def test_a_rejected_body_is_counted_once(site: Site) -> None:
    assert (await site.post("/v1/completions", {**ASK, "max_tokens": -1}))[0] == 400
    async with site.session.get(site.url + "/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if line.startswith("cohort_rejections_total{")]
    [line] = [line for line in lines if not line.endswith(" 0.0")]
    assert 'reason="invalid"' in line and 'status="400"' in line and line.endswith(" 1.0")


async def test_a_body_is_in_flight_until_its_request_is_owned(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies, data = site.gateway.generator.bodies, json.dumps(ASK).encode()
    offer, seen = Streams.offer, []

    def noted(self: Streams, *arguments: Any) -> Any:
        seen.append(bodies.in_flight_bytes)
        return offer(self, *arguments)

    monkeypatch.setattr(Streams, "offer", noted)
    headers = {"Content-Type": "application/json"}
    async with site.session.post(site.url + "/v1/completions", data=data, headers=headers) as response:
        assert response.status == 200
    assert (seen, bodies.in_flight_bytes) == ([len(data)], 0)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/v1/moderations", 404),
        ("GET", "/%ff", 404),
    ],
)
async def test_wrong_addresses_are_json_errors(site: Site, method: str, path: str, status: int) -> None:
    async with site.session.request(method, site.url + path) as response:
        assert (response.status, response.content_type) == (status, "application/json")
        error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == str(status)
        assert ("Allow" in response.headers) == (status == 405)
        assert response.headers["x-request-id"]


async def test_a_wrong_content_type_names_the_curl_option(site: Site) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl says when told nothing
    data = json.dumps(ASK).encode()
    async with site.session.post(site.url + "/v1/completions", data=data, headers=headers) as response:
        assert response.status == 415
        assert "curl, add -H 'Content-Type: application/json'" in (await response.json())["error"]["message"]


async def test_keys(open_site: OpenSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "from-env")
    async with open_site(api_keys=("plain", "env:THE_KEY")) as site:
        for key, status in (("plain", 200), ("from-env", 200), ("env:THE_KEY", 401), ("wrong", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await site.post("/v1/completions", ASK, headers=headers))[0] == status
        async with site.session.post(site.url + "/v1/completions", json=ASK) as response:
            assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        assert (await site.post("/v1/completions", ASK, headers={"Authorization": "Basic plain"}))[0] == 401
        assert (await site.get("/v1/models"))[0] == 401
        for path in ("/health", "/ready", "/version"):
            assert (await site.get(path))[0] == 200


def test_a_key_that_is_missing_is_named_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"api_keys\[1\].*NO_SUCH_KEY"):
        resolve_keys(("a", "env:NO_SUCH_KEY"))
    with pytest.raises(ConfigError, match=r"api_keys\[0\]"):
        resolve_keys(("",))


@pytest.mark.parametrize("given", ["", "x" * 300, "caf\u00e9"])
async def test_request_ids_that_cannot_be_echoed_are_replaced(site: Site, given: str) -> None:
    async with site.session.get(site.url + "/health", headers={"x-request-id": given}) as response:
        assert response.status == 200
        assert response.headers["x-request-id"] not in ("", given)


async def test_a_defect_of_ours_is_a_plain_500(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(site.gateway.generator, "begin", broken)
    status, body = await site.post("/v1/completions", ASK)
    assert (status, body["error"]["code"], "secret" in body["error"]["message"]) == (500, "500", False)


async def test_a_taken_port_is_named(site: Site, open_site: OpenSite, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.port"):
        async with open_site(port=site.gateway.port, instance="other"):
            pass


async def test_nodelay_is_set(site: Site) -> None:
    import socket

    seen = []
    original = site.gateway.generator.arriving

    def spy(request: Any) -> Any:
        seen.append(request.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return original(request)

    site.gateway.generator.arriving = spy  # type: ignore[method-assign]
    await site.post("/v1/completions", ASK)
    assert seen[0] != 0


PIECES = st.sampled_from(
    [
        b'{"prompt":',
        b'"x"',
        b"[1,2]",
        b"[[1],[2]]",
        b',"max_tokens":',
        b"3",
        b"-1",
        b"1e400",
        b',"stream":',
        b"true",
        b"null",
        b',"messages":',
        b'[{"role":"user","content":"x"}]',
        b"}",
        b"{",
        b',"stop":',
        b'""',
        b',"n":',
        b"2",
        b',"logit_bias":',
        b'{"1":2}',
        b',"cohort":',
        b'"\\udc80"',
        b"\xff",
        b',"temperature":',
        b',"logprobs":',
        b',"seed":',
    ]
)


async def test_no_bytes_make_a_500(site: Site) -> None:
    """Hypothesis on the live handler: each example is one real HTTP request."""
    loop = asyncio.get_running_loop()

    async def ask(path: str, data: bytes, headers: dict[str, str]) -> int:
        json_headers = {"Content-Type": "application/json", **headers}
        async with site.session.post(site.url + path, data=data, headers=json_headers) as response:
            await response.read()
            return response.status

    @settings(max_examples=examples(0.8), suppress_health_check=list(HealthCheck))
    @given(
        path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
        data=st.lists(PIECES, max_size=12).map(b"".join) | st.binary(max_size=60),
        headers=st.dictionaries(
            st.sampled_from(["x-cohort-class", "x-request-id", "Authorization", "x-cohort-tpot-slo-ms"]),
            st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=10),
            max_size=2,
        ),
    )
    def fuzz(path: str, data: bytes, headers: dict[str, str]) -> None:
        status = asyncio.run_coroutine_threadsafe(ask(path, data, headers), loop).result(10)
        assert status in (200, 400, 404)

    await asyncio.to_thread(fuzz)
