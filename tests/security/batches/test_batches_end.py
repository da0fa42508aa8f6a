"""Attack: input files that keep a batch unfinished for ever, until such batches fill the service for every API key.

A number out of range, an integer of thousands of digits or broken UTF-8 where the first decoder does not look; bytes
in every place of a line; a failure that repeats; an expiry that nothing looks at. Every batch must end, in a bounded
number of tries, without a 5xx, and one key's unfinished batches must leave others theirs.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cohort.services.gateway.batches import batch_runner
from cohort.services.gateway.batches.batch_files import BatchFolder
from cohort.services.gateway.batches.batch_lines import InputReader
from cohort.services.gateway.batches.batch_runner import BatchRunner
from cohort.services.gateway.batches.batch_store import BatchStore
from tests.examples import examples
from tests.services.gateway.batch_client import ENDED, ask, begin, client_of, ended, job, lines, until
from tests.services.gateway.conftest import OpenSite, Site, eventually, model_dir, open_site  # noqa: F401
from tests.support.steady_loop import use_loop_time

HOSTILE = [
    b"1e999",
    b"-1e999",
    b"9" * 5000,
    b"-" + b"9" * 400 + b".5",
    b'"\xff\xfe"',
    b'"\xc3"',
    b'"\xed\xa0\x80"',
    b'"\\ud800"',
    b'"\\u0000"',
    b'{"\xff": 1}',
    b"[" * 900 + b"]" * 900,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 500 + b"1" + b"}" * 500,
    b"NaN",
    b"",
    b"null",
]
PLACES = (
    "custom_id",
    "method",
    "url",
    "body",
    "model",
    "prompt",
    "max_tokens",
    "stop",
    "logit_bias",
    "metadata",
    "user",
)


def hostile_line(place: str, value: bytes) -> bytes:
    """A good line but for the value at one place."""
    outer = {"custom_id": b'"hostile"', "method": b'"POST"', "url": b'"/v1/completions"'}
    body = {"model": b'"tiny"', "prompt": b'"x"', "max_tokens": b"3"}
    if place in outer:
        outer[place] = value
    elif place != "body":
        body[place] = value
    outer["body"] = value if place == "body" else _object(body)
    return _object(outer) + b"\n"


def _object(members: dict[str, bytes]) -> bytes:
    return b"{" + b", ".join(b'"%s": %s' % (name.encode(), value) for name, value in members.items()) + b"}"


async def run_all(site: Site, files: list[bytes], timeout_s: float) -> list[Any]:
    """Every file as a batch, until all have ended; asserts that nothing is answered with a 5xx meanwhile."""
    async with client_of(site) as client:
        begun = [await begin(client, data) for data in files]
        found = []
        for batch in begun:
            batch = await ended(client, batch, timeout_s)
            found.append(batch)
            for file_id in (batch.output_file_id, batch.error_file_id):
                for line in (await lines(client, file_id)).values() if file_id else ():
                    assert line["response"]["status_code"] < 500, line
        return found


@pytest.mark.parametrize("value", [b"1e999", b"9" * 5000, b'"\xff\xfe"'])
async def test_a_model_that_cannot_be_decoded_is_its_own_lines_business(
    open_site: OpenSite,  # noqa: F811
    value: bytes,
) -> None:
    async with open_site() as site:
        [batch] = await run_all(site, [hostile_line("model", value) + job(ask())], 10.0)
        assert batch.status == "completed"
        assert batch.request_counts.model_dump() == {"total": 2, "completed": 1, "failed": 1}


@settings(
    max_examples=examples(0.25),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    cases=st.lists(
        st.tuples(
            st.sampled_from(PLACES),
            st.one_of(st.sampled_from(HOSTILE), st.binary(max_size=60).map(lambda data: data.replace(b"\n", b""))),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
@example(cases=[("model", value, True) for value in HOSTILE])
@example(cases=[("body", value, False) for value in HOSTILE])
@example(cases=[("custom_id", value, False) for value in HOSTILE])
def test_every_batch_ends_whatever_stands_in_it(
    open_site: OpenSite,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
    cases: list[tuple[str, bytes, bool]],
) -> None:
    """In one try each, and nothing is answered with a 5xx. A case's last part: whether the hostile line comes first and
    so names the batch's model."""
    tries: Counter[str] = Counter()
    original = BatchRunner._advance

    async def counted(runner: BatchRunner, batch_id: str, job: Any) -> None:
        tries[batch_id] += 1
        await original(runner, batch_id, job)

    async def drive(folder: Path) -> list[Any]:
        async with open_site(state={"folder": str(folder)}) as site:
            files = [
                hostile_line(place, value) + job(ask()) if first else job(ask()) + hostile_line(place, value)
                for place, value, first in cases
            ]
            return await run_all(site, files, 20.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchRunner, "_advance", counted)
        batches = asyncio.run(drive(tmp_path_factory.mktemp("hostile") / "batches"))
    assert all(batch.status in ENDED for batch in batches)
    assert dict(tries) == {batch.id: 1 for batch in batches}


async def test_a_defect_that_repeats_fails_the_batch(open_site: OpenSite, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    tries = 0

    def broken(reader: InputReader) -> list[Any]:
        nonlocal tries
        tries += 1
        raise KeyError("a defect")

    monkeypatch.setattr(InputReader, "next", broken)
    monkeypatch.setattr(batch_runner, "FIRST_RETRY_S", 0.01)
    async with open_site() as site, client_of(site) as client:
        batch = await ended(client, await begin(client, job(ask())), 10.0)
        assert (batch.status, tries) == ("failed", 3) and batch.failed_at
        assert batch.errors and batch.errors.data and batch.errors.data[0].code == "internal_error"
        assert "KeyError" not in json.dumps(batch.model_dump()), "a client is not told about our insides"


async def test_a_defect_at_the_end_keeps_the_results(
    open_site: OpenSite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch fails, and the lines that were answered are in its output file."""

    async def broken(runner: BatchRunner, batch: Any) -> Any:
        raise KeyError("a defect")

    monkeypatch.setattr(BatchRunner, "_outcome", broken)
    monkeypatch.setattr(batch_runner, "FIRST_RETRY_S", 0.01)
    async with open_site() as site, client_of(site) as client:
        batch = await ended(client, await begin(client, job(ask(), ask(model="gpt-9"))), 10.0)
        assert batch.status == "failed"
        assert list(await lines(client, batch.output_file_id)) == ["0"]
        assert list(await lines(client, batch.error_file_id)) == ["1"]


async def test_a_batch_whose_input_cannot_be_read_expires(
    open_site: OpenSite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk that fails delays a batch; its window ends it all the same."""

    def failing(reader: InputReader) -> list[Any]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(InputReader, "next", failing)
    monkeypatch.setattr(batch_runner, "FIRST_RETRY_S", 0.01)
    async with open_site() as site, client_of(site) as client:
        batch = await ended(client, await begin(client, job(ask()), window="1s"), 10.0)
        assert (batch.status, bool(batch.expired_at), batch.output_file_id) == ("expired", True, None)


async def test_expiry_ends_a_validation_that_takes_long(open_site: OpenSite, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A file of blank lines yields nothing while it is read; reading it looks at the clock nevertheless."""
    reads = 0
    original = InputReader.__init__

    def endless(reader: InputReader, *args: Any, **kwargs: Any) -> None:
        original(reader, *args, **kwargs)
        file = reader._file

        class Blank:
            def readline(self, size: int) -> bytes:
                nonlocal reads
                reads += 1
                return b"\n" if reads < 20_000_000 else b""

            def close(self) -> None:
                file.close()

        reader._file = Blank()  # type: ignore[assignment]

    monkeypatch.setattr(InputReader, "__init__", endless)
    async with open_site() as site, client_of(site) as client:
        batch = await ended(client, await begin(client, job(ask()), window="1s"), 15.0)
        assert batch.status == "expired" and reads < 20_000_000


async def test_one_key_cannot_take_all_unfinished_batches(open_site: OpenSite) -> None:  # noqa: F811
    endless = open_site(
        lambda request: [9] * 4000, step_s=0.02, api_keys=("mine", "yours"), limits={"unfinished_batches": 4}
    )
    async with endless as site, client_of(site, "mine") as me, client_of(site, "yours") as you:
        long = job(ask(max_tokens=400, ignore_eos=True))
        mine = [await begin(me, long) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match=r"keys\.owner_share: 2 batches") as refused:
            await begin(me, long)
        assert refused.value.response.headers["Retry-After"]
        yours = [await begin(you, long) for _ in range(2)]
        for client, batches in ((me, mine), (you, yours)):
            for batch in batches:
                await client.batches.cancel(batch.id)
                await ended(client, batch)


# -- a disk that never takes the output ----------------------------------------------------------------------------


def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing can be written beside the database; the names of what was tried."""
    tried: list[str] = []

    def refusing(folder: BatchFolder, file_id: str) -> Any:
        tried.append(file_id)
        raise OSError(28, "No space left on device", str(folder.path / "secret-path"))

    original = BatchFolder.write
    monkeypatch.setattr(
        BatchFolder, "write", lambda self, name: refusing(self, name) if "put" in name else original(self, name)
    )
    monkeypatch.setattr(batch_runner, "FIRST_RETRY_S", 0.01)
    return tried


async def test_a_disk_that_never_takes_the_output_fails_the_batch(
    open_site: OpenSite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """After some tries, with the reason; nothing that was answered is lost or answered again: a start on a disk that
    has space writes it."""
    limits = {"output_s": 0.3}
    use_loop_time(monkeypatch)
    with monkeypatch.context() as patch:
        tried = full_disk(patch)
        async with open_site(limits=limits) as site, client_of(site) as client:
            batch = await ended(client, await begin(client, job(ask(), ask(model="gpt-9"))), 10.0)
            assert batch.status == "failed" and batch.failed_at and batch.finalizing_at
            assert (batch.output_file_id, batch.error_file_id) == (None, None)
            assert batch.errors and batch.errors.data
            [error] = batch.errors.data
            assert error.code == "output_not_written" and error.message
            assert "No space left on device" in error.message and "for 0.3 seconds" in error.message
            assert "secret-path" not in error.message
            assert len(tried) >= 2, "tried again before it was given up"
            before = len(tried)
            await asyncio.sleep(0.1)
            assert len(tried) == before, "no further try of this process"
            assert len(site.manager.submitted) == 1

        async with open_site(limits=limits) as site, client_of(site) as client:  # still full
            await eventually(lambda: len(tried) > before)
            again = await ended(client, batch, 10.0)
            assert (again.status, again.output_file_id) == ("failed", None) and len(tried) > before

    async with open_site(limits=limits) as site, client_of(site) as client:
        batch = await until(client, batch, lambda now: now.status == "completed", 10.0)
        assert (batch.errors, batch.failed_at) == (None, None)
        assert list(await lines(client, batch.output_file_id)) == ["0"]
        assert list(await lines(client, batch.error_file_id)) == ["1"]
        assert not site.manager.submitted


async def test_a_cancelled_batch_ends_as_cancelled_when_its_output_can_be_written(
    open_site: OpenSite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    limits = {"output_s": 0.1}
    with monkeypatch.context() as patch:
        full_disk(patch)
        async with open_site(lambda request: [9] * 4000, step_s=0.02, limits=limits) as site, client_of(site) as client:
            batch = await begin(client, job(ask(max_tokens=400, ignore_eos=True)))
            await until(client, batch, lambda now: now.status == "in_progress")
            await client.batches.cancel(batch.id)
            assert (await ended(client, batch, 10.0)).status == "failed"
    async with open_site(limits=limits) as site, client_of(site) as client:
        batch = await until(client, batch, lambda now: now.status == "cancelled", 10.0)
        assert len(await lines(client, batch.error_file_id)) == 1
        assert not site.manager.submitted


async def test_a_database_that_takes_nothing_is_tried_again(
    open_site: OpenSite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Where not even the failure can be written down the batch stays as it is; it ends once the disk has space."""
    refusals = 0
    original = BatchStore.leave_unwritten

    def refusing(store: BatchStore, *args: Any) -> None:
        nonlocal refusals
        refusals += 1
        if refusals <= 2:
            raise sqlite3.OperationalError("database or disk is full")
        original(store, *args)

    full_disk(monkeypatch)
    monkeypatch.setattr(BatchStore, "leave_unwritten", refusing)
    async with open_site(limits={"output_s": 0.05}) as site, client_of(site) as client:
        batch = await ended(client, await begin(client, job(ask())), 10.0)
        assert (batch.status, refusals) == ("failed", 3)
