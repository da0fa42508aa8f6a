"""Keys of a file through the gateway's port: limits, headers, settling, usage, and shares on the way to the manager."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cohort.common.config import KeyLimits
from cohort.common.errors import ConfigError, RequestError
from cohort.common.keys.key_file import OwnLimits, editing, new_key, revoked
from cohort.common.keys.key_usage import UsageStore
from cohort.services.gateway.apis import tenants
from cohort.services.gateway.generation.delta import Caller
from cohort.services.gateway.http.request_bodies import RequestBodies
from cohort.services.gateway.keys.key_budget import KeyBudget
from cohort.services.gateway.requests.parsing import RequestParser
from cohort.services.gateway.text.tokenizer import Tokenizer
from tests.services.gateway.batch_client import ask, begin, client_of, ended, job
from tests.services.gateway.conftest import OpenSite, Site, eventually

ASK: dict[str, Any] = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
LONG: dict[str, Any] = {"prompt": [5] * 10, "max_tokens": 50, "ignore_eos": True}
NO_LIMITS = OwnLimits()


def endless(request: Any) -> list[int]:
    return [9] * 4000


def add(path: Path, name: str, *, rt: OwnLimits = NO_LIMITS, be: OwnLimits = NO_LIMITS, **more: Any) -> dict[str, str]:
    """Headers of a new key."""
    with editing(path) as held:
        held[0], _, secret = new_key(held[0], name, 1, rt=rt, be=be, **more)
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "keys" / "keys.json"


def breaks(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(content)


def of(path: Path, **more: Any) -> dict[str, Any]:
    return {"file": str(path), **more}


def budget_of(site: Site, name: str, traffic_class: Any = "rt") -> KeyBudget:
    tenants = site.gateway._tenants
    [key] = [key for key in site.gateway._keyring.known() if key.name == name]
    return tenants.budget(key, traffic_class)


async def post(site: Site, headers: dict[str, str], body: Any = ASK, path: str = "/v1/completions") -> Any:
    """Status, headers and JSON."""
    async with site.session.post(site.url + path, json=body, headers=headers) as response:
        return response.status, response.headers, await response.json()


async def usage(site: Site, headers: dict[str, str], query: str = "") -> list[dict[str, Any]]:
    status, answer = await site.get(f"/v1/usage{query}", headers=headers)
    assert status == 200, answer
    return [{name: value for name, value in row.items() if name not in ("date", "key_id")} for row in answer["data"]]


# -- keys ----------------------------------------------------------------------------------------------------------


async def test_keys_come_and_go_without_a_restart(open_site: OpenSite, key_file: Path) -> None:
    alice = add(key_file, "alice")
    async with open_site(api_keys=("plain",), keys=of(key_file)) as site:
        plain = {"Authorization": "Bearer plain"}
        assert [(await post(site, key))[0] for key in (alice, plain)] == [200, 200]
        bob = add(key_file, "bob")
        assert (await post(site, bob))[0] == 200
        with editing(key_file) as held:
            held[0], _ = revoked(held[0], "alice", 2)
        assert [(await post(site, key))[0] for key in (alice, bob, plain)] == [401, 200, 200]
        await eventually(site.nothing_left)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": 9, "salt": "", "keys": []}', None])
async def test_a_file_that_breaks_changes_nothing(open_site: OpenSite, key_file: Path, content: bytes | None) -> None:
    alice = add(key_file, "alice")
    async with open_site(keys=of(key_file)) as site:
        breaks(key_file, content)
        assert [(await post(site, key))[0] for key in (alice, {}, {"Authorization": "Bearer "})] == [200, 401, 401]
        breaks(key_file, None)
        bob = add(key_file, "bob")  # a new file, with another salt
        assert [(await post(site, key))[0] for key in (alice, bob)] == [401, 200]


async def test_a_missing_file_is_named_at_start(open_site: OpenSite, key_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.file: .*keys\.json: cannot be read"):
        async with open_site(keys=of(key_file)):
            pass


async def test_an_empty_file_lets_nobody_in(open_site: OpenSite, key_file: Path) -> None:
    add(key_file, "alice")
    with editing(key_file) as held:
        held[0], _ = revoked(held[0], "alice", 2)
    async with open_site(keys=of(key_file)) as site:
        assert (await site.post("/v1/completions", ASK))[0] == 401
        assert (await site.get("/health"))[0] == 200


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": ASK,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "ignore_eos": True},
    "/v1/responses": {"input": "x", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
}


@pytest.mark.parametrize("way", ["whole", "stream", "resumable"])
@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_charges_its_key(open_site: OpenSite, key_file: Path, path: str, way: str) -> None:
    """Lines of batches and streams that go on elsewhere: below, and in `resume/test_resumption.py`."""
    alice = add(key_file, "alice")
    kept = {"x-cohort-resume": "keep"} if way == "resumable" else {}
    body = {"model": "tiny", **ROUTES[path], "stream": way != "whole"}
    async with open_site(endless, keys=of(key_file)) as site:
        async with site.session.post(site.url + path, json=body, headers={**alice, **kept}) as response:
            assert response.status == 200 and ("x-cohort-resume" in response.headers) == bool(kept)
            await response.read()
        await eventually(lambda: not budget_of(site, "alice").open)
        [row] = await usage(site, alice)
        assert (row["requests"], row["completion_tokens"]) == (1, 4) and row["prompt_tokens"] > 0


# -- limits --------------------------------------------------------------------------------------------------------


async def test_requests_beyond_the_minute_are_refused_and_told_when(open_site: OpenSite, key_file: Path) -> None:
    alice = add(key_file, "alice", rt=OwnLimits(requests_per_minute=2), be=OwnLimits(requests_per_minute=1))
    bob = add(key_file, "bob")
    async with open_site(keys=of(key_file)) as site:
        for left in ("1", "0"):
            status, headers, _ = await post(site, alice)
            assert (status, headers["x-ratelimit-limit-requests"]) == (200, "2")
            assert headers["x-ratelimit-remaining-requests"] == left
        status, headers, body = await post(site, alice)
        error = body["error"]
        assert (status, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert "requests_per_minute of key alice, class rt is 2" in body["error"]["message"]
        assert 1 <= int(headers["Retry-After"]) <= 30
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert (await post(site, {**alice, "x-cohort-class": "be"}))[0] == 200  # another budget
        status, headers, body = await post(site, {**alice, "x-cohort-class": "be"})
        assert status == 429 and "class be is 1" in body["error"]["message"]
        status, headers, _ = await post(site, bob)
        assert status == 200 and not any(name.lower().startswith("x-ratelimit") for name in headers)
        async with site.session.get(site.url + "/v1/models", headers=alice) as response:
            assert response.status == 200 and response.headers["x-ratelimit-limit-requests"] == "2"
        rows = {(row["key_name"], row["class"]): row for row in await usage(site, alice)}
        assert {place: (row["requests"], row["refused"]) for place, row in rows.items()} == {
            ("alice", "rt"): (2, 1),
            ("alice", "be"): (1, 1),
        }
        metrics = await site.monitors_metrics()
        assert 'cohort_key_refused_total{instance="gateway",key="alice"' in metrics
        assert "key-" not in metrics and "ck_" not in metrics


READS = ["responses/none", "responses/none/input_items", "files", "files/none/content", "batches/none", "streams/none"]


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_read_of_what_is_stored_is_one_of_the_minutes_requests(
    open_site: OpenSite, key_file: Path, processes: int
) -> None:
    """And of nothing else: a key whose tokens or open requests are spent may read what they made."""
    own = OwnLimits(requests_per_minute=len(READS) + 1, tokens_per_day=1, concurrent_requests=1)
    alice = add(key_file, "alice", rt=own)
    async with open_site(keys=of(key_file), processes=processes) as site:
        budget_of(site, "alice").admit(site.gateway._context.clock.now_s(), site.gateway._context.clock.wall_s())
        budget_of(site, "alice").day.used = 1
        for left, path in zip(reversed(range(len(READS))), READS, strict=True):
            async with site.session.get(f"{site.url}/v1/{path}", headers=alice) as response:
                assert response.status == (200 if path == "files" else 404), path
                assert response.headers["x-ratelimit-remaining-requests"] == str(left)
        for path in READS:
            async with site.session.get(f"{site.url}/v1/{path}", headers=alice) as response:
                assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
        for path in ("models", "usage"):
            assert (await site.get(f"/v1/{path}", headers=alice))[0] == 200
        [row] = await usage(site, alice)
        assert (row["requests"], row["refused"]) == (0, len(READS))
        assert budget_of(site, "alice").open == 1


async def test_tokenising_counts_as_a_request_and_costs_no_tokens(open_site: OpenSite, key_file: Path) -> None:
    alice = add(key_file, "alice", rt=OwnLimits(requests_per_minute=3, tokens_per_day=1000))
    messages = [{"role": "user", "content": "x"}]
    async with open_site(keys=of(key_file)) as site:
        for path, body in (
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [5]}),
            ("/v1/messages/count_tokens", {"model": "tiny", "messages": messages}),
        ):
            async with site.session.post(site.url + path, json=body, headers=alice) as response:
                assert (response.status, response.headers["x-ratelimit-remaining-tokens"]) == (200, "1000")
        for path in ("/tokenize", "/detokenize"):
            status, answer = await site.post(path, {"prompt": "x"}, headers=alice)
            assert status == 429 and "requests_per_minute of key alice" in answer["error"]["message"]
        assert not budget_of(site, "alice").open


LARGE = b'{"prompt": "' + b"x " * 5_000_000 + b'"}'


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute", "tokens_per_day", "concurrent_requests"])
async def test_a_refusal_looks_at_no_body(
    open_site: OpenSite, key_file: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Ten megabytes are neither collected nor parsed nor tokenised, and are not even invited."""
    looked: list[str] = []
    alice = add(key_file, "alice", rt=OwnLimits(**{limit: 5 if "tokens" in limit else 1}))
    async with open_site(endless, keys=of(key_file), step_s=0.02, max_body_bytes=20 << 20) as site:
        running = asyncio.create_task(post(site, alice, {**ASK, "max_tokens": 4 if "tokens" in limit else 500}))
        await eventually(lambda: bool(site.manager.submitted))
        for owner, name in ((RequestBodies, "reading"), (RequestParser, "read"), (Tokenizer, "encode_all")):
            original = getattr(owner, name)

            def noted(self: Any, *args: Any, original: Any = original, name: str = name, **more: Any) -> Any:
                looked.append(name)
                return original(self, *args, **more)

            monkeypatch.setattr(owner, name, noted)
        for path in (*ROUTES, "/tokenize", "/detokenize"):
            headers = {**alice, "Content-Type": "application/json"}
            async with site.session.post(site.url + path, data=LARGE, headers=headers) as response:
                assert response.status == 429 and limit in await response.text()
            assert b" 429 " in await first_line(site, path, alice)
        assert not looked and not site.gateway.generator.bodies.in_flight_bytes
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await eventually(site.nothing_left)


async def first_line(site: Site, path: str, headers: dict[str, str]) -> bytes:
    """What a client that asks first is told."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
    given = {**headers, "Content-Type": "application/json", "Content-Length": str(len(LARGE)), "Expect": "100-continue"}
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *(f"{name}: {value}" for name, value in given.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    line = await reader.readline()
    writer.close()
    return line


async def test_a_body_is_invited_once_its_headers_are_good(open_site: OpenSite, key_file: Path) -> None:
    alice = add(key_file, "alice")
    async with open_site(keys=of(key_file)) as site:
        assert b" 100 " in await first_line(site, "/v1/completions", alice)
        assert b" 401 " in await first_line(site, "/v1/completions", {})
        async with site.session.post(site.url + "/v1/completions", json=ASK, headers=alice, expect100=True) as response:
            assert response.status == 200
        async with site.session.post(
            site.url + "/v1/completions", json=ASK, headers={**alice, "Expect": "the best"}
        ) as response:
            assert response.status == 417


# -- SLOs ----------------------------------------------------------------------------------------------------------


async def test_slos_are_counted_by_key_and_class(open_site: OpenSite, key_file: Path) -> None:
    alice, bob = add(key_file, "alice"), add(key_file, "bob")
    late = {"x-cohort-ttft-slo-ms": "0.001"}
    async with open_site(keys=of(key_file), rt_ttft_slo_s=60.0, rt_tpot_slo_s=60.0) as site:
        await post(site, alice)
        await post(site, {**alice, **late}, {**ASK, "n": 2})
        await post(site, {**alice, **late, "x-cohort-class": "be"})
        await post(site, {**bob, "x-cohort-class": "be"})  # without SLOs
        await eventually(site.nothing_left)
        rows = {(row["key_name"], row["class"]): row for row in await usage(site, alice)}
        assert {place: (row["slo_requests"], row["slo_met"]) for place, row in rows.items()} == {
            ("alice", "rt"): (3, 1),
            ("alice", "be"): (1, 0),
        }
        [row] = await usage(site, bob)
        assert (row["requests"], row["slo_requests"], row["slo_met"]) == (1, 0, 0)
        series = await slo_series(site)
        assert series["alice", "rt", "ttft", "met"] == 1 and series["alice", "rt", "ttft", "missed"] == 2
        assert series["alice", "be", "ttft", "missed"] == 1
        assert not any(key == "bob" for key, *_ in series)


async def slo_series(site: Site) -> dict[tuple[str, ...], float]:
    metrics = await site.monitors_metrics()
    return {
        tuple(sample.labels[name] for name in ("key", "class", "objective", "outcome")): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "cohort_key_slo_requests_total"
    }


@pytest.mark.parametrize(("most", "names"), [(2, {"one", "two", "other"}), (9, {"one", "two", "three"})])
async def test_the_series_of_keys_are_bounded(
    open_site: OpenSite, key_file: Path, most: int, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "SLO_KEYS", most)
    keys = [add(key_file, name) for name in ("one", "two", "three")]
    async with open_site(keys=of(key_file)) as site:
        for key in (*keys, *keys):
            await post(site, key)
        await eventually(site.nothing_left)
        series = await slo_series(site)
        assert {key for key, *_ in series} == names
        assert sum(value for (_, _, objective, _), value in series.items() if objective == "ttft") == 6
        assert [(await usage(site, key))[0]["slo_requests"] for key in keys] == [2, 2, 2]


async def test_streams_and_errors_name_the_limits_too(open_site: OpenSite, key_file: Path) -> None:
    alice = add(key_file, "alice", rt=OwnLimits(tokens_per_day=1000))
    async with open_site(keys=of(key_file)) as site:
        async with site.session.post(
            site.url + "/v1/completions", json={**ASK, "stream": True}, headers=alice
        ) as response:
            assert response.headers["x-ratelimit-remaining-tokens"] == str(1000 - 1 - 4)
            assert (await response.read()).endswith(b"[DONE]\n\n")
        status, headers, _ = await post(site, alice, {**ASK, "temperature": "hot"})
        assert status == 400 and headers["x-ratelimit-limit-tokens"] == "1000"
        status, headers, _ = await post(site, alice, path="/v1/nothing")
        assert status == 404 and "x-ratelimit-limit-tokens" in headers
        async with site.session.post(site.url + "/v1/completions", json=ASK) as response:
            assert response.status == 401 and "x-ratelimit-limit-tokens" not in response.headers


async def test_a_class_named_in_the_body_takes_that_classes_limits(open_site: OpenSite, key_file: Path) -> None:
    alice = add(key_file, "alice", rt=OwnLimits(requests_per_minute=5), be=OwnLimits(tokens_per_minute=20))
    async with open_site(keys=of(key_file)) as site:
        status, headers, _ = await post(site, alice, {**ASK, "cohort": {"class": "be"}})
        assert status == 200 and headers["x-ratelimit-limit-tokens"] == "20"
        assert "x-ratelimit-limit-requests" not in headers
        assert budget_of(site, "alice").requests.level(0.0) == 5
        assert int(budget_of(site, "alice", "be").tokens.level(0.0)) == 15
        assert [row["class"] for row in await usage(site, alice)] == ["be"]


async def test_what_an_answer_did_not_use_is_given_back(open_site: OpenSite, key_file: Path) -> None:
    alice = add(key_file, "alice", rt=OwnLimits(tokens_per_day=1000, concurrent_requests=1))
    async with open_site("one two", keys=of(key_file)) as site:  # ends long before its max_tokens
        status, headers, body = await post(site, alice, {"prompt": [5] * 10, "max_tokens": 300})
        used = body["usage"]["total_tokens"]
        assert status == 200 and used < 50
        assert int(headers["x-ratelimit-remaining-tokens"]) == 1000 - used
        status, headers, body = await post(site, alice, {"prompt": [5] * 10, "max_tokens": 4, "n": 3})
        used += body["usage"]["total_tokens"]
        assert int(headers["x-ratelimit-remaining-tokens"]) == 1000 - used
        [row] = await usage(site, alice)
        assert (row["requests"], row["prompt_tokens"] + row["completion_tokens"]) == (2, used)


async def test_a_request_that_was_cancelled_in_the_queue_gives_everything_back(
    open_site: OpenSite, key_file: Path
) -> None:
    alice = add(key_file, "alice", rt=OwnLimits(tokens_per_day=100, concurrent_requests=1))
    async with open_site(keys=of(key_file)) as site:
        site.manager.place = False
        asking = asyncio.create_task(post(site, alice, LONG))
        await eventually(lambda: len(site.manager.submitted) == 1)
        status, headers, body = await post(site, alice)
        assert status == 429 and "concurrent_requests" in body["error"]["message"]
        assert headers["x-ratelimit-remaining-tokens"] == "40"
        asking.cancel()
        await eventually(lambda: budget_of(site, "alice").open == 0)
        site.manager.place = True
        status, headers, _ = await post(site, alice)
        assert (status, headers["x-ratelimit-remaining-tokens"]) == (200, str(100 - 5))


async def test_a_request_that_was_cancelled_at_work_pays_for_what_it_got(open_site: OpenSite, key_file: Path) -> None:
    alice = add(key_file, "alice", rt=OwnLimits(tokens_per_day=100))
    async with open_site(endless, step_s=0.01, keys=of(key_file)) as site:
        async with site.session.post(
            site.url + "/v1/completions", json={**LONG, "stream": True}, headers=alice
        ) as response:
            await response.content.readline()
            await response.content.readline()
            response.close()
        await eventually(lambda: budget_of(site, "alice").open == 0)
        left = budget_of(site, "alice").day.level(site.context.clock.wall_s())
        assert 40 < left < 90  # the prompt, and some of the fifty tokens
        [row] = await usage(site, alice)
        assert row["prompt_tokens"] + row["completion_tokens"] == 100 - left
        await eventually(site.nothing_left)


async def test_a_request_that_the_server_refuses_costs_nothing(open_site: OpenSite, key_file: Path) -> None:
    limits = OwnLimits(requests_per_minute=5, tokens_per_day=1000)
    alice, bob = add(key_file, "alice", rt=limits), add(key_file, "bob")
    async with open_site(keys=of(key_file), max_waiting_requests=2) as site:
        site.manager.place = False
        waiting = [asyncio.create_task(post(site, key)) for key in (bob, alice)]
        await eventually(lambda: len(site.manager.submitted) == 2)
        before = int(budget_of(site, "alice").requests.level(0.0)), budget_of(site, "alice").day.level(0.0)
        status, _, body = await post(site, alice)
        assert status == 429 and "waiting already" in body["error"]["message"]
        assert (int(budget_of(site, "alice").requests.level(0.0)), budget_of(site, "alice").day.level(0.0)) == before
        for task in waiting:
            task.cancel()
        await eventually(site.nothing_left)


async def test_an_answer_without_max_tokens_is_settled_by_what_came(open_site: OpenSite, key_file: Path) -> None:
    """It is not refused for all that the context would leave it, and pays for all that it got."""
    alice = add(key_file, "alice", rt=OwnLimits(tokens_per_minute=60))
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
    async with open_site(endless, keys=of(key_file), default_prediction_tokens=8, default_max_tokens=90) as site:
        status, headers, answer = await post(site, alice, body, "/v1/chat/completions")
        assert (status, answer["usage"]["completion_tokens"]) == (200, 90)
        assert headers["x-ratelimit-remaining-tokens"] == "0"
        status, headers, answer = await post(site, alice, body, "/v1/chat/completions")
        assert status == 429 and "tokens_per_minute" in answer["error"]["message"]
        assert int(headers["Retry-After"]) > 30  # until the debt is paid


async def test_limits_of_the_configuration_hold_for_plain_keys_and_are_the_default(
    open_site: OpenSite, key_file: Path
) -> None:
    alice, bob = add(key_file, "alice", rt=OwnLimits(requests_per_minute=3)), add(key_file, "bob")
    plain = {"Authorization": "Bearer plain"}
    async with open_site(api_keys=("plain",), keys=of(key_file, limits=KeyLimits(requests_per_minute=2))) as site:
        limits = [(await post(site, key))[1]["x-ratelimit-limit-requests"] for key in (alice, bob, plain)]
        assert limits == ["3", "2", "2"]
        rows = await usage(site, plain)
        assert [row["key_name"] for row in rows] == ["config-0"]


async def test_without_limits_and_keys_nothing_is_said(site: Site) -> None:
    async with site.session.post(site.url + "/v1/completions", json=ASK) as response:
        assert response.status == 200 and not any(name.startswith("x-rate") for name in response.headers)
    assert (await site.get("/v1/usage"))[0] == 404


# -- usage ---------------------------------------------------------------------------------------------------------


async def test_a_key_sees_its_own_usage_and_an_admin_all(open_site: OpenSite, key_file: Path, tmp_path: Path) -> None:
    alice, boss = add(key_file, "alice"), add(key_file, "boss", admin=True)
    async with open_site(keys=of(key_file)) as site:
        for key in (alice, alice, boss):
            assert (await post(site, key))[0] == 200
        assert {row["key_name"] for row in await usage(site, alice)} == {"alice"}
        assert {row["key_name"] for row in await usage(site, boss)} == {"boss"}
        rows = await usage(site, boss, "?keys=all&days=0")
        assert [(row["key_name"], row["requests"]) for row in rows] == [("alice", 2), ("boss", 1)]
        assert (await site.get("/v1/usage?keys=all", headers=alice))[0] == 403
        for query in ("?days=x", "?days=-1", "?days=401", "?days=99999999999", "?keys=others", "?days=%D9%A3"):
            assert (await site.get(f"/v1/usage{query}", headers=boss))[0] == 400
        assert (await site.get("/v1/usage"))[0] == 401
    store = UsageStore(tmp_path / "key-usage.sqlite3", read_only=True)
    assert sum(row.requests for row in store.rows(since="2000-01-01")) == 3
    store.close()


async def test_a_days_tokens_survive_a_restart(open_site: OpenSite, key_file: Path) -> None:
    alice = add(key_file, "alice", rt=OwnLimits(tokens_per_day=12))
    for left in ("7", "2"):
        async with open_site(keys=of(key_file)) as site:
            status, headers, _ = await post(site, alice)
            assert (status, headers["x-ratelimit-remaining-tokens"]) == (200, left)
    async with open_site(keys=of(key_file)) as site:
        status, headers, body = await post(site, alice)
        assert status == 429 and "tokens_per_day" in body["error"]["message"]


async def test_a_database_that_cannot_be_used_costs_the_figures_alone(
    open_site: OpenSite, key_file: Path, tmp_path: Path
) -> None:
    alice = add(key_file, "alice")
    (tmp_path / "key-usage.sqlite3").write_bytes(b"no database" * 100)
    async with open_site(keys=of(key_file)) as site:
        assert (await post(site, alice))[0] == 200
        assert (await site.get("/v1/usage", headers=alice))[0] == 503


# -- batches and shares --------------------------------------------------------------------------------------------


async def test_lines_of_a_batch_count_as_best_effort_of_their_key(open_site: OpenSite, key_file: Path) -> None:
    alice = add(key_file, "alice", be=OwnLimits(tokens_per_day=100_000))
    async with open_site(keys=of(key_file)) as site, client_of(site, alice["Authorization"][7:]) as client:
        batch = await ended(client, await begin(client, job(ask(), ask(), ask())))
        assert batch.request_counts and batch.request_counts.completed == 3
        [row] = await usage(site, alice)
        assert (row["class"], row["requests"]) == ("be", 3) and row["completion_tokens"] > 0


async def test_a_key_at_its_limit_does_not_hold_up_the_lines_of_another(open_site: OpenSite, key_file: Path) -> None:
    alice, bob = add(key_file, "alice", be=OwnLimits(requests_per_minute=1)), add(key_file, "bob")
    async with (
        open_site(keys=of(key_file), batch={"concurrency": 2}) as site,
        client_of(site, alice["Authorization"][7:]) as one,
        client_of(site, bob["Authorization"][7:]) as other,
    ):
        slow = await begin(one, job(*[ask(max_tokens=1) for _ in range(6)]))
        await eventually(lambda: len(site.manager.submitted) >= 1)
        quick = await ended(other, await begin(other, job(*[ask(max_tokens=1) for _ in range(6)])))
        assert quick.request_counts and quick.request_counts.completed == 6
        left = await one.batches.retrieve(slow.id)
        assert left.request_counts and left.request_counts.completed < 6
        await one.batches.cancel(slow.id)
        await ended(one, slow)
        assert site.gateway._tenants._usage is not None
        assert [row["refused"] for row in await usage(site, alice)] == [0]  # it only waited


async def test_lines_beyond_the_open_requests_of_their_key_come_in_turn(open_site: OpenSite, key_file: Path) -> None:
    alice = add(key_file, "alice", be=OwnLimits(concurrent_requests=2))
    most = 0

    def script(request: Any) -> list[int]:
        nonlocal most
        most = max(most, budget_of(site, "alice", "be").open)
        return [9] * 4

    async with (
        open_site(script, step_s=0.01, keys=of(key_file)) as site,
        client_of(site, alice["Authorization"][7:]) as client,
    ):
        batch = await ended(client, await begin(client, job(*[ask(max_tokens=4) for _ in range(8)])))
        assert batch.request_counts and batch.request_counts.completed == 8
        assert most == 2


async def test_lines_of_a_revoked_key_fail(open_site: OpenSite, key_file: Path) -> None:
    alice = add(key_file, "alice")
    async with open_site(keys=of(key_file)) as site, client_of(site, alice["Authorization"][7:]) as client:
        uploaded = await client.files.create(file=("in.jsonl", job(ask())), purpose="batch")
        answer = site.gateway._tenants.lines(site.gateway._api.answer_line)
        key = site.gateway._keyring.known()[0]
        with editing(key_file) as held:
            held[0], _ = revoked(held[0], "alice", 2)
        with pytest.raises(RequestError, match="revoked") as caught:
            await answer(json.dumps(ASK).encode(), Caller(key.owner, "l", 0.0), chat=False)
        assert caught.value.status == 401 and uploaded.id
        with pytest.raises(openai.AuthenticationError):
            await client.files.list()


async def test_requests_carry_their_keys_share_to_the_manager(open_site: OpenSite, key_file: Path) -> None:
    alice, bob = add(key_file, "alice", weight=4.0), add(key_file, "bob")
    async with open_site(keys=of(key_file)) as site:
        for key in (alice, bob, alice):
            assert (await post(site, key))[0] == 200
        shares: Sequence[tuple[str, float]] = [(sent.owner, sent.weight) for sent in site.manager.submitted]
        assert [weight for _, weight in shares] == [4.0, 1.0, 4.0]
        assert shares[0][0] == shares[2][0] != shares[1][0] and all(owner for owner, _ in shares)
