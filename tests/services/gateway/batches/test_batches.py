"""Batches over HTTP, with the openai package's own client where it can say what is meant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cohort.common.errors import ConfigError
from cohort.common.messages import Refused
from cohort.common.types import Attempt
from tests.services.gateway.batch_client import ENDED, ask, begin, client_of, ended, job, lines, until
from tests.services.gateway.conftest import ANSWER, OpenSite, Site, eventually


@pytest.fixture
async def client(site: Site) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(site) as client:
        yield client


@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_a_batch(client: openai.AsyncOpenAI, site: Site, kind: str) -> None:
    bodies = [ask(str(index)) for index in range(20)]
    if kind == "chat":
        bodies = [{"model": "tiny", "messages": [{"role": "user", "content": str(index)}]} for index in range(20)]
    batch = await begin(client, job(*bodies, kind=kind), kind, metadata={"run": "7"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"run": "7"})
    batch = await ended(client, batch)
    assert (batch.status, batch.errors, batch.error_file_id, batch.model) == ("completed", None, None, "tiny")
    assert batch.request_counts and batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    moments = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert all(moments) and moments == sorted(moments)  # type: ignore[type-var]
    assert batch.expires_at == batch.created_at + 86_400
    found = await lines(client, batch.output_file_id)
    assert list(found) == [str(index) for index in range(20)], "in the order of the input"
    prompt_tokens = 0
    for line in found.values():
        assert set(line) == {"id", "custom_id", "response", "error"} and line["error"] is None
        assert line["response"]["status_code"] == 200 and line["response"]["request_id"].startswith(line["id"])
        body = line["response"]["body"]
        [choice] = body["choices"]
        assert (choice["message"]["content"] if kind == "chat" else choice["text"]) == ANSWER
        assert body["cohort"]["requests"][0]["class"] == "be"
        prompt_tokens += body["usage"]["prompt_tokens"]
    assert batch.usage and batch.usage.input_tokens == prompt_tokens
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    output = await client.files.retrieve(str(batch.output_file_id))
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


async def test_lines_are_best_effort_offline_and_last_in_priority(client: openai.AsyncOpenAI, site: Site) -> None:
    await client.completions.create(**ask(), extra_body={"priority": 2**31 - 1})
    named: dict[str, Any] = {"cohort": {"class": "rt", "online": True}, "priority": -(2**31)}
    await ended(client, await begin(client, job(ask(), ask(**named))))
    online, *offline = site.manager.submitted
    assert online.online and len(offline) == 2
    for request in offline:
        assert (request.traffic_class, request.online, request.slo.ttft_s) == ("be", False, 0.0)
        assert request.priority > online.priority


async def test_errors_of_a_line_stay_in_the_line(client: openai.AsyncOpenAI) -> None:
    bad = [ask(model="gpt-9"), ask(temperature=9), ask(stream=True), {"nonsense": 1}, ask(max_tokens=10**6)]
    batch = await ended(client, await begin(client, job(ask(), *bad, ask())))
    assert (batch.status, batch.errors) == ("completed", None)
    assert batch.request_counts and batch.request_counts.model_dump() == {"total": 7, "completed": 2, "failed": 5}
    assert list(await lines(client, batch.output_file_id)) == ["0", "6"]
    errors = await lines(client, batch.error_file_id)
    assert [line["response"]["status_code"] for line in errors.values()] == [404, 400, 400, 400, 400]
    assert errors["1"]["error"] is None and errors["1"]["response"]["body"]["error"]["param"] == "model"


async def test_a_bad_input_fails_the_batch(client: openai.AsyncOpenAI, site: Site) -> None:
    batch = await ended(client, await begin(client, job(ask()) + b"rubbish\n" + job(ask())))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at and batch.errors and batch.errors.data and batch.errors.object == "list"
    found = [(error.code, error.line) for error in batch.errors.data]
    assert found == [("invalid_json_line", 2), ("duplicate_custom_id", 3)]
    assert site.manager.submitted == []


async def test_a_batch_of_errors_alone_has_no_output_file(client: openai.AsyncOpenAI) -> None:
    batch = await ended(client, await begin(client, job(ask(model="gpt-9"))))
    assert (batch.status, batch.output_file_id) == ("completed", None) and batch.error_file_id


async def test_cancelling_keeps_finished_lines(open_site: OpenSite) -> None:
    """The first lines have short answers, the others never end."""
    async with open_site(lambda request: [9] * 4000, step_s=0.02) as site, client_of(site) as client:
        bodies = [ask(max_tokens=1), ask(max_tokens=1), *[ask(max_tokens=400, ignore_eos=True)] * 4]
        batch = await begin(client, job(*bodies))
        batch = await until(client, batch, lambda now: bool(now.request_counts and now.request_counts.completed == 2))
        assert batch.status == "in_progress"
        with pytest.raises(openai.ConflictError):
            await client.files.delete(batch.input_file_id)
        batch = await client.batches.cancel(batch.id)
        assert batch.status in ("cancelling", "cancelled") and batch.cancelling_at
        batch = await ended(client, batch)
        assert (batch.status, bool(batch.cancelled_at)) == ("cancelled", True)
        assert list(await lines(client, batch.output_file_id)) == ["0", "1"]
        errors = await lines(client, batch.error_file_id)
        assert {name: line["error"]["code"] for name, line in errors.items()} == dict.fromkeys(
            "2345", "batch_cancelled"
        )
        await eventually(site.nothing_left)
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel((await ended(client, await begin(client, job(ask(max_tokens=1))))).id)
        await client.files.delete(batch.input_file_id)


async def test_expiry_writes_finished_lines(open_site: OpenSite) -> None:
    async with open_site(lambda request: [9] * 4000, step_s=0.02) as site, client_of(site) as client:
        bodies = [ask(max_tokens=1), ask(max_tokens=400, ignore_eos=True)]
        batch = await ended(client, await begin(client, job(*bodies), window="3s"))  # from a whole second on
        assert (batch.status, bool(batch.expired_at), bool(batch.completed_at)) == ("expired", True, False)
        assert list(await lines(client, batch.output_file_id)) == ["0"]
        errors = await lines(client, batch.error_file_id)
        assert (errors["1"]["response"], errors["1"]["error"]["code"]) == (None, "batch_expired")
        await eventually(site.nothing_left)


async def test_an_interrupted_batch_goes_on_and_repeats_nothing(open_site: OpenSite) -> None:
    """The first gateway stops in the middle; the second one finds what is left in the folder."""
    bodies = [ask(f"p{index}", max_tokens=2) for index in range(30)]
    async with open_site(step_s=0.05, batch={"concurrency": 4}) as site, client_of(site) as client:
        batch = await begin(client, job(*bodies))
        await until(client, batch, lambda now: bool(now.request_counts and now.request_counts.completed >= 8))
        site.context.stopping.set()
        assert site.task is not None
        await site.task
    async with open_site() as site, client_of(site) as client:
        left = await client.batches.retrieve(batch.id)
        assert left.request_counts
        batch = await ended(client, batch)
        assert (batch.status, len(await lines(client, batch.output_file_id))) == ("completed", 30)
        again = len(site.manager.submitted)
        assert 0 < again <= 30 - 8, f"{again} lines ran after the restart"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "99d"}, "completion_window"),
        ({"input_file_id": "file-nobody"}, "input_file_id"),
        ({"metadata": {"k": "v" * 513}}, "metadata[...]"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": "\udc80"}, None),
    ],
)
async def test_bad_batches_are_400(client: openai.AsyncOpenAI, site: Site, change: dict[str, Any], param: Any) -> None:
    file = await client.files.create(file=job(ask()), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h", **change}
    status, answer = await site.post("/v1/batches", body)
    assert status == 400, answer
    if param is not None:
        assert answer["error"]["param"] == param
    assert (await site.get("/v1/batches"))[1]["data"] == []


async def test_an_unknown_id_is_404(site: Site) -> None:
    for path in ("/v1/files/x", "/v1/files/x/content", "/v1/batches/x", "/v1/files/%ff", "/v1/files/%2e%2e%2flock"):
        assert (await site.get(path))[0] == 404
    assert (await site.post("/v1/batches/x/cancel", {}))[0] == 404
    for query in ("limit=0", "limit=x", "limit=101", "nonsense=1"):
        assert (await site.get(f"/v1/batches?{query}"))[0] == 400
    assert (await site.get("/v1/files?order=up"))[0] == 400


async def test_batches_are_listed_newest_first(client: openai.AsyncOpenAI) -> None:
    made = [await begin(client, job(ask())) for _ in range(5)]
    assert [batch.id async for batch in client.batches.list(limit=2)] == [batch.id for batch in reversed(made)]
    page = await client.batches.list(limit=2, after=made[3].id)
    assert ([batch.id for batch in page.data], page.has_more) == ([made[2].id, made[1].id], True)
    for batch in made:
        await ended(client, batch)


async def test_every_key_has_its_own_files(open_site: OpenSite) -> None:
    async with (
        open_site(api_keys=("mine", "yours")) as site,
        client_of(site, "mine") as me,
        client_of(site, "yours") as you,
    ):
        batch = await ended(me, await begin(me, job(ask())))
        assert batch.status == "completed"
        assert [found.id async for found in you.files.list()] == []
        assert [found.id async for found in you.batches.list()] == []
        for call in (you.batches.retrieve, you.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        for file_id in (batch.input_file_id, str(batch.output_file_id)):
            for read in (you.files.retrieve, you.files.content, you.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await read(file_id)
        with pytest.raises(openai.BadRequestError):
            await you.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )
        assert len([found.id async for found in me.files.list()]) == 2


async def test_a_busy_server_makes_lines_wait_and_not_fail(open_site: OpenSite) -> None:
    async with open_site(max_waiting_requests=3, batch={"concurrency": 8}) as site, client_of(site) as client:
        batch = await ended(client, await begin(client, job(*[ask(max_tokens=1) for _ in range(12)])))
        assert batch.request_counts and batch.request_counts.completed == 12


async def test_lost_workers_cost_a_line_only_after_many_tries(open_site: OpenSite) -> None:
    async with open_site() as site, client_of(site) as client:
        site.manager.place = False
        batch = await begin(client, job(ask(), ask()))
        refusals = 0
        async with asyncio.timeout(60):
            while (await client.batches.retrieve(batch.id)).status not in ENDED:
                for request in site.manager.submitted[refusals:]:
                    site.manager.bus.send("gateway", Refused(Attempt(request.request_id, 0), 503, "nobody"))
                    refusals += 1
                await asyncio.sleep(0.01)
        assert refusals == 10
        errors = await lines(client, (await client.batches.retrieve(batch.id)).error_file_id)
        assert [line["response"]["status_code"] for line in errors.values()] == [503, 503]


async def test_no_line_starts_while_an_online_request_waits(open_site: OpenSite) -> None:
    async with open_site(step_s=0.01, batch={"concurrency": 4}) as site, client_of(site) as client:
        site.manager.place = False
        asking = asyncio.create_task(site.post("/v1/completions", ask("online")))
        await eventually(lambda: len(site.manager.submitted) == 1)
        batch = await begin(client, job(*[ask(max_tokens=1) for _ in range(6)]))
        await eventually(lambda: len(site.manager.submitted) == 2)
        await asyncio.sleep(0.1)
        assert [request.online for request in site.manager.submitted] == [True, False], "one line, no more"
        asking.cancel()  # nobody waits any more
        await eventually(lambda: len(site.manager.submitted) == 5)
        await client.batches.cancel(batch.id)
        await ended(client, batch)


async def test_too_many_batches_are_429(open_site: OpenSite) -> None:
    endless = open_site(lambda request: [9] * 4000, step_s=0.02, limits={"unfinished_batches": 1})
    async with endless as site, client_of(site) as client:
        batch = await begin(client, job(ask(max_tokens=400, ignore_eos=True)))
        with pytest.raises(openai.RateLimitError):
            await begin(client, job(ask()))
        await client.batches.cancel(batch.id)
        await ended(client, batch)
        await ended(client, await begin(client, job(ask(max_tokens=1))))


async def test_metrics(client: openai.AsyncOpenAI, site: Site) -> None:
    await ended(client, await begin(client, job(ask(), ask(model="gpt-9"))))
    await ended(client, await begin(client, b"rubbish"))
    common = 'instance="gateway",model_name="tiny"'
    expected = (
        f'cohort_batches{{{common},status="completed"}} 1.0',
        f'cohort_batches{{{common},status="failed"}} 1.0',
        f'cohort_batches{{{common},status="in_progress"}} 0.0',
        f'cohort_batch_lines_total{{{common},outcome="completed"}} 1.0',
        f'cohort_batch_lines_total{{{common},outcome="failed"}} 1.0',
        f"cohort_batch_lines_in_work{{{common}}} 0.0",
    )
    for _ in range(100):  # a batch has ended before it is counted as ended
        async with site.session.get(site.url + "/metrics") as response:
            text = await response.text()
        missing = [line for line in expected if line not in text]
        if not missing:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"missing: {missing}")


async def test_a_folder_has_one_gateway(site: Site, open_site: OpenSite) -> None:
    with pytest.raises(ConfigError, match=r"state\.folder: another gateway"):
        async with open_site():
            pass


async def test_a_folder_that_cannot_be_used_is_named_at_start(open_site: OpenSite, tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"a file")
    with pytest.raises(ConfigError, match=r"state\.folder: .*taken"):
        async with open_site(state={"folder": str(tmp_path / "taken")}):
            pass


async def test_a_full_disk_delays_and_does_not_end_anything(
    client: openai.AsyncOpenAI, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output file cannot be written at first; nothing is answered twice because of that."""
    from cohort.services.gateway.batches.batch_files import ContentWriter

    refusals = 0
    original = ContentWriter.commit

    def refusing(writer: ContentWriter) -> None:
        nonlocal refusals
        if refusals == 0 and "output" in writer._target.name:
            refusals += 1
            raise OSError(28, "No space left on device")
        original(writer)

    monkeypatch.setattr(ContentWriter, "commit", refusing)
    batch = await ended(client, await begin(client, job(ask(), ask())))
    assert (batch.status, refusals) == ("completed", 1)
    assert len(site.manager.submitted) == 2 and len(await lines(client, batch.output_file_id)) == 2
