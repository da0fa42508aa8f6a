"""Responses in the background: they go on without a client, are read as they are, followed, cancelled, and continued by
another gateway."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.conftest import ANSWER, OpenSite, Site
from tests.services.gateway.named_events import named_stream, parse_named
from tests.services.gateway.resume.test_resumption import copied

PATH = "/v1/responses"
ASK: dict[str, Any] = {"input": "Tell me", "max_output_tokens": 90, "background": True}
A, B = ({"Authorization": f"Bearer key-{name}"} for name in "ab")


class Held(asyncio.Event):
    """Workers stop before a token until it is set, after the first `free` ones."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free

    async def gate(self) -> None:
        self.free -= 1
        if self.free < 0:
            await self.wait()


async def begun(site: Site, free: int = 5, **headers: Any) -> tuple[Held, dict[str, Any]]:
    held = Held(free)
    site.manager.gate = held.gate
    status, answer = await site.post(PATH, ASK, **headers)
    assert (status, answer["status"], answer["background"], answer["output"]) == (200, "in_progress", True, [])
    return held, answer


async def ended(site: Site, response_id: str, **headers: Any) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while True:
            status, answer = await site.get(f"{PATH}/{response_id}", **headers)
            assert status == 200
            if answer["status"] not in ("queued", "in_progress"):
                return answer
            await asyncio.sleep(0.01)


async def cancel(site: Site, response_id: str, **headers: Any) -> tuple[int, Any]:
    async with site.session.post(f"{site.url}{PATH}/{response_id}/cancel", **headers) as response:
        return response.status, await response.json()


async def test_it_is_answered_at_once_and_read_at_its_end(open_site: OpenSite) -> None:
    async with open_site() as site:
        held, begun_as = await begun(site)
        assert await site.get(f"{PATH}/{begun_as['id']}") == (200, begun_as)
        held.set()
        answer = await ended(site, begun_as["id"])
        assert answer["status"] == "completed" and answer["output"][0]["content"][0]["text"] == ANSWER
        assert {**answer, **{key: begun_as[key] for key in ("status", "output", "usage", "completed_at")}} == {
            **begun_as,
            "cohort": answer["cohort"],
        }
        assert (await cancel(site, answer["id"])) == (200, answer)  # it has ended
        status, _ = await site.post(PATH, {"input": "More", "previous_response_id": answer["id"]})
        assert status == 200 and ANSWER in site.tokenizer.decode(site.manager.submitted[-1].tokens, skip_special=True)
        assert site.nothing_left()


async def test_it_needs_no_client_however_long(open_site: OpenSite) -> None:
    async with open_site(resume_s=0.2) as site:
        held, answer = await begun(site)
        await asyncio.sleep(1.0)  # a stream without a client would have been given up
        held.set()
        assert (await ended(site, answer["id"]))["output"][0]["content"][0]["text"] == ANSWER


async def test_a_stream_is_followed_after_any_event(open_site: OpenSite) -> None:
    async with open_site() as site:
        held = Held(5)
        site.manager.gate = held.gate
        async with site.session.post(site.url + PATH, json={**ASK, "stream": True}) as response:
            [first] = parse_named(_without_ids(await response.content.readuntil(b"\n\n")))
        response_id = first["response"]["id"]  # and its connection ends
        assert first["response"]["background"] is True
        assert (await site.get(f"{PATH}/{response_id}"))[1]["status"] == "in_progress"
        held.set()
        answer = await ended(site, response_id)
        for after in (None, 0, 3):
            tail = "" if after is None else f"&starting_after={after}"
            async with site.session.get(f"{site.url}{PATH}/{response_id}?stream=true{tail}") as response:
                assert response.status == 200
                events = parse_named(_without_ids(await response.read()))
            first_number = 0 if after is None else after + 1
            assert [event["sequence_number"] for event in events] == list(
                range(first_number, first_number + len(events))
            )
            assert {**events[-1]["response"], "cohort": answer["cohort"]} == answer  # whose times are its reader's
        assert (await site.get(f"{PATH}/{response_id}?stream=true&starting_after=x"))[0] == 400


def _without_ids(data: bytes) -> bytes:
    return b"\n".join(line for line in data.split(b"\n") if not line.startswith(b"id: "))


async def test_it_is_cancelled(open_site: OpenSite) -> None:
    async with open_site() as site:
        _, answer = await begun(site)
        status, cancelled = await cancel(site, answer["id"])
        assert (status, cancelled) == (200, {**answer, "status": "cancelled"})
        assert await site.get(f"{PATH}/{answer['id']}") == (200, cancelled)
        assert await cancel(site, answer["id"]) == (200, cancelled)
        async with asyncio.timeout(5):
            while not site.nothing_left():  # noqa: ASYNC110 -- the gateway has no events for its tests
                await asyncio.sleep(0.01)
        assert site.manager.cancelled


async def test_it_belongs_to_its_key(open_site: OpenSite) -> None:
    async with open_site(api_keys=("key-a", "key-b")) as site:
        held, answer = await begun(site, headers=A)
        one = f"{PATH}/{answer['id']}"
        for tail in ("", "?stream=true"):
            assert (await site.get(one + tail, headers=B))[0] == 404
        assert (await cancel(site, answer["id"], headers=B))[0] == 404
        held.set()
        assert (await ended(site, answer["id"], headers=A))["status"] == "completed"


async def test_a_failure_is_kept(open_site: OpenSite) -> None:
    async with open_site(request_timeout_s=0.3) as site:
        _, answer = await begun(site)
        failed = await ended(site, answer["id"])
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")


@pytest.mark.parametrize("free", [0, 7])
async def test_another_gateway_ends_what_a_killed_one_began(open_site: OpenSite, tmp_path: Path, free: int) -> None:
    """No client asks for it meanwhile: it is found in the database of streams."""
    async with open_site(resume_s=2.0, request_timeout_s=120.0) as site:
        _, answer = await begun(site, free)
        await asyncio.sleep(0.3)  # what came is written down
        state = copied(tmp_path)
        shutil.copytree(tmp_path / "batches", tmp_path / "copy" / "batches")
        async with open_site(resume_s=2.0, request_timeout_s=120.0, state=state) as other:
            taken = await ended(other, answer["id"])
            assert taken["output"][0]["content"][0]["text"] == ANSWER and taken["id"] == answer["id"]
            [request] = other.manager.submitted
            assert len(request.tokens) - request.prompt_tokens in (0, free, free + 1)


@pytest.mark.parametrize(
    ("change", "options"), [({"store": False}, {}), ({}, {"responses": {"storage_bytes": 0}}), ({}, {"resume_s": 0})]
)
async def test_where_nobody_could_read_it(open_site: OpenSite, change: Any, options: Any) -> None:
    async with open_site(**options) as site:
        status, answer = await site.post(PATH, {**ASK, **change})
        assert (status, answer["error"]["param"]) == (400, "background") and not site.manager.submitted


async def test_without_space_for_its_output_it_is_refused(open_site: OpenSite) -> None:
    async with open_site(limits={"streams_bytes": 1000}) as site:
        status, answer = await site.post(PATH, ASK)
        assert (status, answer["error"]["param"]) == (503, "background") and site.nothing_left()
        assert [event["type"] for event in await named_stream(site, PATH, {**ASK, "background": False})][-1] == (
            "response.completed"
        )
