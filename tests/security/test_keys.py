"""Attack: one API key takes what all keys share: the queue, its tokens, the first place in it.

Requests without number, few requests with answers of any length, and priorities that win over everything.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import openai
import pytest

from cohort.common.config import Config
from cohort.common.errors import RequestError
from cohort.common.machines.effects import Admitted, Rejected
from cohort.common.machines.events import Estimated, Offered
from cohort.common.messages import Placed
from cohort.common.tokens import listed
from cohort.common.types import Attempt
from cohort.services.gateway.keys.owners import Owners
from tests.common.machines.small_gateway import PROMPT, Gateway, only, request
from tests.services.gateway.batch_client import ask, begin, client_of, ended, job
from tests.services.gateway.conftest import OpenSite, Site, eventually, model_dir, open_site  # noqa: F401

A, B = {"Authorization": "Bearer key-a"}, {"Authorization": "Bearer key-b"}
KEYS = ("key-a", "key-b")
ASK: dict[str, Any] = {"prompt": "x", "max_tokens": 4}


def offer(gateway: Gateway, owner: str, *names: str, named: bool = True, **options: Any) -> RequestError | None:
    """None when all of them came in."""
    requests = [request(name, **options) for name in names]
    effects = gateway.tell(Offered("offer", requests, owner=owner, max_tokens_named=named))
    rejected = only(Rejected, effects)
    assert bool(rejected) != bool(only(Admitted, effects))
    return rejected[0].error if rejected else None


# -- the queue -----------------------------------------------------------------------------------------------------


def test_one_key_fills_its_share_of_the_queue_and_no_more() -> None:
    gateway = Gateway(max_waiting_requests=8)
    assert offer(gateway, "a", "a0", "a1", "a2") is None
    assert offer(gateway, "a", "a3", "a4") is not None  # together they would be five
    assert offer(gateway, "a", "a3") is None
    refused = offer(gateway, "a", "a4")
    assert refused is not None and refused.status == 429 and refused.retry_after_s
    assert "keys.owner_share 0.5 of gateway.max_waiting_requests 8" in refused.message
    assert only(Rejected, gateway.tell(Estimated("e", 10, "rt", "a")))  # before its body is read
    assert only(Admitted, gateway.tell(Estimated("e", 10, "rt", "b")))
    assert offer(gateway, "b", "b0", "b1", "b2", "b3") is None
    assert offer(gateway, "c", "c0") is not None  # eight wait
    gateway.answer("a0")
    gateway.manager(Placed(Attempt("a0", 0), ["w"], 0.1, "test"))  # waits no more
    assert offer(gateway, "a", "a4") is None


def test_a_share_is_counted_by_requested_tokens() -> None:
    gateway = Gateway(max_waiting_tokens=2000, default_prediction_tokens=10)
    assert offer(gateway, "a", "a0", max_tokens=900) is None
    refused = offer(gateway, "a", "a1", max_tokens=900)
    assert refused is not None and "keys.owner_share 0.5 of gateway.max_waiting_tokens 2000" in refused.message
    assert offer(gateway, "a", "a1", max_tokens=90) is None
    assert offer(gateway, "b", "b0", max_tokens=900) is None
    # "As many as fit" is no wish: it counts as what is predicted.
    assert offer(gateway, "c", "c0", max_tokens=900, named=False) is None
    assert gateway.machine.ledger.waiting_of("c").tokens == len(PROMPT) + 10


def test_a_single_request_beyond_the_share_comes_in_when_nothing_of_its_key_waits() -> None:
    gateway = Gateway(max_waiting_tokens=2000)
    assert offer(gateway, "a", "a0", max_tokens=1500) is None
    assert offer(gateway, "a", "a1", max_tokens=1) is not None


def test_without_owners_nothing_is_shared_out() -> None:
    gateway = Gateway(max_waiting_requests=4, max_waiting_tokens=10_000, default_prediction_tokens=10)
    assert offer(gateway, "", "a0", "a1", "a2", "a3", max_tokens=9000) is None
    assert gateway.machine.ledger.waiting_tokens == 4 * (len(PROMPT) + 10)
    refused = offer(gateway, "", "a4")
    assert refused is not None and "owner_share" not in refused.message


async def fill(site: Site, headers: dict[str, str], count: int) -> list[asyncio.Task[Any]]:
    before = len(site.manager.submitted)
    tasks = [asyncio.create_task(site.post("/v1/completions", ASK, headers=headers)) for _ in range(count)]
    await eventually(lambda: len(site.manager.submitted) == before + count)
    return tasks


async def test_a_key_that_floods_leaves_half_to_the_others(open_site: OpenSite) -> None:  # noqa: F811
    async with open_site(api_keys=KEYS, max_waiting_requests=8, batch={"concurrency": 1}) as site:
        site.manager.place = False
        tasks = await fill(site, A, 4)
        async with site.session.post(site.url + "/v1/completions", json=ASK, headers=A) as response:
            message = (await response.json())["error"]["message"]
            assert (response.status, bool(response.headers["Retry-After"])) == (429, True)
        assert "keys.owner_share 0.5 of gateway.max_waiting_requests 8" in message
        tasks += await fill(site, B, 4)
        for task in tasks:
            task.cancel()
        await eventually(site.nothing_left)


@pytest.mark.parametrize(("secrets", "several"), [(("s", "s"), False), (("s", "t"), True)], ids=["same", "different"])
async def test_two_names_of_one_secret_are_one_owner_everywhere(
    open_site: OpenSite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    secrets: tuple[str, str],
    several: bool,
) -> None:
    """Shares of the queue, salts of prefixes, and shares of files and batches begin at the same number of secrets,
    however many names they have."""
    for name, secret in zip(("COHORT_TEST_A", "COHORT_TEST_B"), secrets, strict=True):
        monkeypatch.setenv(name, secret)
    limits: dict[str, Any] = {"max_waiting_requests": 4, "limits": {"unfinished_batches": 2}}
    opened = open_site(
        lambda request: [9] * 4000, step_s=0.02, api_keys=("env:COHORT_TEST_A", "env:COHORT_TEST_B"), **limits
    )
    async with opened as site, client_of(site, "s") as client:
        owners = site.gateway._owners
        assert owners.several == several and bool(owners.queue_owner("o")) == several
        long = job(ask(max_tokens=400, ignore_eos=True))
        batches = [await begin(client, long)]
        if several:
            with pytest.raises(openai.RateLimitError, match=r"keys\.owner_share: 1 batches"):
                await begin(client, long)
        else:
            batches.append(await begin(client, long))
        for batch in batches:
            await client.batches.cancel(batch.id)
            await ended(client, batch)
        site.manager.submitted.clear()
        site.manager.place = False
        asking = asyncio.create_task(site.post("/v1/completions", ASK, headers={"Authorization": "Bearer s"}))
        await eventually(lambda: len(site.manager.submitted) == 1)
        assert bool(site.manager.submitted[0].prefix_salt) == several
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_request_beyond_the_share_is_400(open_site: OpenSite) -> None:  # noqa: F811
    async with open_site(api_keys=KEYS, max_waiting_requests=8, max_waiting_tokens=2000) as site:
        status, body = await site.post("/v1/completions", {**ASK, "n": 5}, headers=A)
        assert (status, "keys.owner_share" in body["error"]["message"]) == (400, True)
        status, body = await site.post("/v1/completions", {**ASK, "n": 4, "max_tokens": 400}, headers=A)
        assert (status, "gateway.max_waiting_tokens 2000" in body["error"]["message"]) == (400, True)
        assert (await site.post("/v1/completions", {**ASK, "n": 4}, headers=A))[0] == 200


async def test_logs_and_recordings_name_no_key(open_site: OpenSite) -> None:  # noqa: F811
    async with open_site(api_keys=KEYS) as site:
        told: list[Any] = []
        machine = site.gateway._machine
        handle = machine.handle
        machine.handle = lambda now_s, *events: (told.extend(events), handle(now_s, *events))[1]  # type: ignore[method-assign]
        assert (await site.post("/v1/completions", ASK, headers=A))[0] == 200
        offered = [event for event in told if isinstance(event, Offered)]
        assert offered and offered[0].owner
        assert b"key-a" not in msgspec.json.encode(told, enc_hook=listed)


# -- priorities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "asked", "becomes"), [((), -7, -7), (("k",), -7, 0), (("k",), 7, 7), (KEYS, -(2**31), 0)]
)
def test_the_reach_of_a_priority(keys: tuple[str, ...], asked: int, becomes: int) -> None:
    assert Owners(Config(), keys).priority(asked) == becomes


async def test_no_key_overtakes_the_others(open_site: OpenSite) -> None:  # noqa: F811
    async with open_site(api_keys=KEYS) as site:
        for asked in (-(2**31), 5):
            assert (await site.post("/v1/completions", {**ASK, "priority": asked}, headers=A))[0] == 200
        assert [submitted.priority for submitted in site.manager.submitted] == [0, 5]
