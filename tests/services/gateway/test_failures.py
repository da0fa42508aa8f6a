"""Whatever dies or is lost, the client's stream shows no gap, no duplicate and no wrong text; or a clear error."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Any

import pytest

from cohort.common.messages import Refused, TokenUpdate
from cohort.common.types import Attempt, FinishReason
from tests.services.gateway.apis.test_openai_api import texts
from tests.services.gateway.cluster import Manager
from tests.services.gateway.conftest import ANSWER, OpenSite, Site, eventually, parse_events

LONG = {"prompt": "x", "max_tokens": 100}


async def running(site: Site, count: int = 1) -> None:
    await eventually(lambda: len(site.manager.held()) >= count)


async def test_streams_survive_the_death_of_their_worker(open_site: OpenSite) -> None:
    async with open_site(step_s=0.01) as site:
        site.manager.add_worker("worker-1")
        streams = [asyncio.create_task(site.stream("/v1/completions", LONG)) for _ in range(20)]
        await running(site, 20)
        await asyncio.sleep(0.04)
        lost = site.manager.workers[0].kill()
        assert lost
        await asyncio.sleep(0.02)
        site.manager.lose(lost, "worker-0 is dead")
        results = await asyncio.gather(*streams)
        assert [texts(events) for events in results] == [ANSWER] * 20
        attempts = [events[-2]["cohort"]["requests"][0]["attempts"] for events in results]
        assert sorted(attempts) == [1] * (20 - len(lost)) + [2] * len(lost)
        again = [request for request in site.manager.submitted if request.attempt.number == 1]
        assert all(request.output_known > 0 for request in again)  # what was there is not computed anew
        await eventually(site.nothing_left)


async def test_streams_survive_the_death_of_the_manager(open_site: OpenSite) -> None:
    """Workers go on meanwhile; the new manager hears at once what is outstanding and gives back what nobody holds."""
    async with open_site(step_s=0.02) as site:
        stream = asyncio.create_task(site.stream("/v1/completions", LONG))
        await running(site)
        site.network.kill("manager")
        lost = site.manager.workers[0].kill()
        waiting = asyncio.create_task(site.stream("/v1/completions", {**LONG, "prompt": "y"}))
        await asyncio.sleep(0.1)
        assert not stream.done() and not waiting.done()
        successor = Manager(site.network, site.manager.script, incarnation=2)
        task = asyncio.create_task(successor.run())
        await eventually(lambda: any(set(lost) <= set(named) for named in successor.outstanding), 8)
        successor.lose(lost)
        assert texts(await stream) == ANSWER
        assert texts(await waiting) == ANSWER
        task.cancel()


async def test_lost_tokens_are_computed_again(open_site: OpenSite) -> None:
    async with open_site(step_s=0.01) as site:
        stream = asyncio.create_task(site.stream("/v1/completions", LONG))
        await running(site)
        await eventually(lambda: any(entry.output for entry in site.gateway.streams.ledger.entries()))
        site.network.cut("worker-0", "gateway")
        await asyncio.sleep(0.03)
        site.network.reconnect("worker-0", "gateway")
        events = await stream
        assert texts(events) == ANSWER
        assert events[-2]["cohort"]["requests"][0]["attempts"] == 2


async def test_repeated_tokens_show_once(site: Site) -> None:
    site.manager.place = False
    stream = asyncio.create_task(site.stream("/v1/completions", {**LONG, "max_tokens": 3}))
    await eventually(lambda: bool(site.manager.submitted))
    [request] = site.manager.submitted
    tokens = site.tokenizer.encode("The quick brown", special_tokens=False)
    worker, at = site.manager.workers[0], request.prompt_tokens

    def send(offset: int, *, finish: FinishReason | None = None) -> None:
        worker.send(
            [TokenUpdate(Attempt(request.request_id, 0), at + offset, tokens[offset : offset + 1], finish=finish)]
        )

    for offset in (0, 0, 1, 0, 1):
        send(offset)
    send(2, finish=FinishReason.LENGTH)
    assert texts(await stream) == "The quick brown"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_everything(open_site: OpenSite, stream: bool) -> None:
    async with open_site(step_s=0.05) as site:
        posting = asyncio.create_task(site.post("/v1/completions", {**LONG, "n": 3, "stream": stream}))
        await running(site, 3)
        await asyncio.sleep(0.1)
        posting.cancel()
        await eventually(site.nothing_left, 3)
        assert len({held.request_id for held in site.manager.cancelled}) == 3
        status, metrics = await _metrics(site)
        assert status == 200 and 'finished_reason="cancelled"' in metrics
        assert site.predictor.observed == []  # a length nobody waited for teaches nothing


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"model": "tiny", "input": "Hi"}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
async def test_a_client_of_any_api_that_leaves_frees_its_request(
    open_site: OpenSite, path: str, body: dict[str, Any], stream: bool
) -> None:
    async with open_site(step_s=0.05) as site:
        asking = asyncio.create_task(site.post(path, {**body, "stream": stream}))
        await running(site)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(site.nothing_left)
        assert site.manager.cancelled


async def test_a_client_that_does_not_read_is_given_up(open_site: OpenSite) -> None:
    options = {"write_timeout_s": 0.2, "max_request_work": 1_000_000, "max_open_work": 1_000_000}
    async with open_site(lambda request: [9] * 400, step_s=0.0, **options) as site:
        body = b'{"prompt": "x", "max_tokens": 400, "stream": true, "n": 100, "ignore_eos": true, "logprobs": 20}'
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, ("127.0.0.1", site.gateway.port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        await loop.sock_sendall(raw, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await eventually(lambda: len(site.manager.submitted) == 100)
        await eventually(site.nothing_left, 15)
        raw.close()


async def test_an_error_before_the_first_token_is_a_status(site: Site) -> None:
    site.manager.place = False
    asking = asyncio.create_task(site.post("/v1/completions", {**LONG, "stream": True}))
    await eventually(lambda: bool(site.manager.submitted))
    site.manager.bus.send(
        "gateway", Refused(Attempt(site.manager.submitted[0].request_id, 0), 503, "no worker could hold it")
    )
    status, body = await asking
    assert (status, body["error"]["message"], body["error"]["code"]) == (503, "no worker could hold it", "503")


async def test_an_error_in_mid_stream_is_an_event_and_a_proper_end(open_site: OpenSite) -> None:
    async with open_site(step_s=0.02) as site:
        asking = asyncio.create_task(site.stream("/v1/completions", {**LONG, "n": 2}))
        await eventually(lambda: any(entry.output for entry in site.gateway.streams.ledger.entries()))
        entry = next(iter(site.gateway.streams.ledger.entries()))
        site.manager.workers[0].send(
            [TokenUpdate(Attempt(entry.request_id, 0), entry.known, finish=FinishReason.FAILED, error="device lost")]
        )
        *_, error, done = await asking
        assert done == "[DONE]"
        assert (error["error"]["code"], "device lost" in error["error"]["message"]) == ("500", True)
        await eventually(site.nothing_left)


async def test_a_request_that_no_worker_can_finish_ends_with_503(open_site: OpenSite) -> None:
    async with open_site(step_s=5.0, settings={"max_attempts": 2}) as site:
        asking = asyncio.create_task(site.post("/v1/completions", LONG))
        for attempt in range(2):
            await eventually(partial(_submitted, site, attempt + 1))
            site.manager.lose([Attempt(site.manager.submitted[-1].request_id, attempt)])
        status, body = await asking
        assert (status, "2 times" in body["error"]["message"]) == (503, True)


async def test_a_request_has_a_deadline(open_site: OpenSite) -> None:
    async with open_site(step_s=30.0, request_timeout_s=0.5) as site:
        status, body = await site.post("/v1/completions", LONG)
        assert (status, body["error"]["type"]) == (504, "timeout_error")
        await eventually(site.nothing_left)


async def test_a_full_queue_answers_429_with_retry_after(open_site: OpenSite) -> None:
    async with open_site(max_waiting_requests=2) as site:
        site.manager.place = False
        waiting = [asyncio.create_task(site.post("/v1/completions", LONG)) for _ in range(2)]
        await eventually(lambda: len(site.manager.submitted) == 2)
        headers = {"Content-Type": "application/json"}
        async with site.session.post(site.url + "/v1/completions", data=b"not even read", headers=headers) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            body = await response.json()
        assert (body["error"]["code"], body["error"]["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        for task in waiting:
            task.cancel()
        await eventually(site.nothing_left)
        site.manager.place = True
        assert (await site.post("/v1/completions", LONG))[0] == 200


async def test_choices_come_in_together_or_not_at_all(open_site: OpenSite) -> None:
    async with open_site(max_waiting_requests=4) as site:
        site.manager.place = False
        waiting = asyncio.create_task(site.post("/v1/completions", {**LONG, "n": 3}))
        await eventually(lambda: len(site.manager.submitted) == 3)
        assert (await site.post("/v1/completions", {**LONG, "n": 2}))[0] == 429
        assert len(site.manager.submitted) == 3
        waiting.cancel()
        status, body = await site.post("/v1/completions", {**LONG, "prompt": ["a"] * 3, "n": 2})
        assert (status, body["error"]["param"]) == (400, "n")  # could never be let in
        await eventually(site.nothing_left)


async def test_draining_finishes_running_requests_and_refuses_new_ones(open_site: OpenSite) -> None:
    async with open_site(step_s=0.05, drain_s=30.0) as site:
        stream = asyncio.create_task(site.stream("/v1/completions", LONG))
        await running(site)
        site.context.stopping.set()
        ready = asyncio.create_task(site.get("/ready"))  # at once: when the stream has ended nothing listens any more
        async with site.session.post(site.url + "/v1/completions", json=LONG) as response:
            assert (response.status, int(response.headers["Retry-After"]) >= 1) == (503, True)
        assert (await ready)[0] == 503
        assert texts(await stream) == ANSWER


async def test_a_request_cut_off_by_the_end_of_the_drain_is_told_so(open_site: OpenSite) -> None:
    async with open_site(lambda request: [9] * 90, step_s=0.05, drain_s=0.3) as site:
        stream = asyncio.create_task(site.stream("/v1/completions", {**LONG, "max_tokens": 90}))
        await eventually(lambda: any(entry.output for entry in site.gateway.streams.ledger.entries()))
        site.context.stopping.set()
        *_, error, done = await stream
        assert (error["error"]["code"], done) == ("503", "[DONE]")


async def test_without_a_manager_it_lives_waits_and_says_why_it_is_not_ready(open_site: OpenSite) -> None:
    async with open_site(with_manager=False, wait_ready=False) as site:
        assert (await site.get("/health"))[0] == 200
        status, body = await site.get("/ready")
        assert (status, "manager" in body["reason"]) == (503, True)
        asking = asyncio.create_task(site.post("/v1/completions", LONG))
        await asyncio.sleep(0.3)
        assert not asking.done()
        manager = asyncio.create_task(site.manager.run())
        assert (await asking)[0] == 200
        await site.ready()
        manager.cancel()


async def test_a_silent_manager_makes_it_unready(open_site: OpenSite) -> None:
    async with open_site() as site:
        site.network.kill("manager")
        async with asyncio.timeout(6):
            while (await site.get("/ready"))[0] == 200:  # noqa: ASYNC110 -- over HTTP there is no event to wait for
                await asyncio.sleep(0.05)
        assert "silent" in (await site.get("/ready"))[1]["reason"]


async def test_a_dead_predictor_costs_nothing_but_its_guess(open_site: OpenSite) -> None:
    async with open_site(with_predictor=False, settings={"predictor_wait_s": 0.01}) as site:
        for _ in range(12):
            status, body = await site.post("/v1/completions", LONG)
            assert status == 200
            assert body["cohort"]["requests"][0]["prediction"]["source"] == "default"
        assert "cohort_default_predictions_total" in (await _metrics(site))[1]


async def test_the_wire_is_not_believed(site: Site) -> None:
    """Tokens for requests nobody has, and messages no gateway expects, change nothing."""
    worker = site.manager.workers[0]
    worker.send([TokenUpdate(Attempt("nobody", 0), 3, [1, 2])])
    worker.bus.send("gateway", Refused(Attempt("nobody", 0), 400, "?"))
    await eventually(lambda: Attempt("nobody", 0) in site.manager.cancelled)
    assert (await site.post("/v1/completions", LONG))[1]["choices"][0]["text"] == ANSWER


def _submitted(site: Site, count: int) -> bool:
    return len(site.manager.submitted) == count


async def _metrics(site: Site) -> tuple[int, str]:
    async with site.session.get(site.url + "/metrics") as response:
        return response.status, await response.text()


async def test_the_first_token_leaves_before_the_last_one_is_there(open_site: OpenSite) -> None:
    async with open_site(step_s=0.05) as site:
        loop = asyncio.get_running_loop()
        body = {**LONG, "stream": True}
        async with site.session.post(site.url + "/v1/completions", json=body) as response:
            data = await response.content.readuntil(b"\n\n")
            first_s = loop.time()
            rest: Any = await response.read()
        assert loop.time() - first_s > 0.3
        assert texts(parse_events(data + rest)) == ANSWER


async def test_a_defect_in_mid_stream_is_an_event_too(open_site: OpenSite, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_site(step_s=0.01) as site:
        shape = site.gateway.generator.completion
        original = shape.chunk
        calls = []

        def breaks(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            if len(calls) == 3:
                raise ZeroDivisionError("secret")
            return original(*args, **kwargs)

        monkeypatch.setattr(shape, "chunk", breaks)
        *_, error, done = await site.stream("/v1/completions", LONG)
        assert (error["error"]["code"], "secret" in str(error), done) == ("500", False, "[DONE]")
        await eventually(site.nothing_left)
