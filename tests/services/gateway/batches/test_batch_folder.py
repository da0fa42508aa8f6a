"""Gateways of one port share a folder of batches; one of them runs the batches, and another when that one ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from cohort.common.errors import ConfigError
from cohort.services.gateway.batches.batch_files import BatchFolder
from tests.services.gateway.batch_client import ask, begin, client_of, ended, job
from tests.services.gateway.conftest import OpenSite, eventually


def folder(path: Path, *, shared: bool) -> BatchFolder:
    return BatchFolder(path, shared=shared)


def test_the_folder_of_a_single_gateway_is_its_own(tmp_path: Path) -> None:
    first = folder(tmp_path, shared=False)
    first.open()
    assert first.is_exclusive and first.may_run()
    with pytest.raises(ConfigError, match="another gateway uses"):
        folder(tmp_path, shared=False).open()
    first.close()
    second = folder(tmp_path, shared=False)
    second.open()
    assert second.is_exclusive
    second.close()


def test_of_several_the_first_cleans_up_and_one_at_a_time_runs(tmp_path: Path) -> None:
    first, second = (folder(tmp_path, shared=True) for _ in range(2))
    first.open()
    assert first.is_exclusive, "what a killed process left is cleaned up by one that has the folder alone"
    first.admit_others()
    second.open()
    assert not first.is_exclusive and not second.is_exclusive
    assert second.may_run() and second.may_run() and not first.may_run()
    second.close()
    assert first.may_run()
    with pytest.raises(ConfigError, match="another gateway uses"):
        folder(tmp_path, shared=False).open()
    first.close()


WRITER = """
import sys, time
from pathlib import Path
from cohort.services.gateway.batches.batch_files import BatchFolder
writing = BatchFolder(Path(sys.argv[1]), shared=True).write(f"file-{1:024x}")
writing.write(b"half")
print("held", flush=True)
time.sleep(60)
"""


def test_half_written_contents_go_with_the_process_that_wrote_them(tmp_path: Path) -> None:
    here = folder(tmp_path, shared=True)
    here.open()
    here.admit_others()
    foreign = tmp_path / "files" / "notes.part"
    foreign.write_bytes(b"not of this program's making")
    there = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert there.stdout is not None and there.stdout.readline() == b"held\n"
        with here.write(f"file-{2:024x}") as own:
            own.write(b"whole")
            assert here.remove_abandoned_parts() == 0
            there.kill()
            there.wait()
            assert here.remove_abandoned_parts() == 1
            assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [f"file-{2:024x}.part", "notes.part"]
            own.commit()
        assert here.remove_abandoned_parts() == 0
        assert here.content(f"file-{2:024x}").read_bytes() == b"whole"
    finally:
        there.kill()
        there.communicate()
        here.close()


def test_a_content_is_begun_anew_over_what_a_killed_process_left(tmp_path: Path) -> None:
    """An output has the same name whichever gateway writes it."""
    here = folder(tmp_path, shared=True)
    here.open()
    name = f"file-{3:024x}-output"
    (tmp_path / "files" / f"{name}.part").write_bytes(b"longer than what follows")
    with here.write(name) as writer:
        writer.write(b"short")
        writer.commit()
    assert here.content(name).read_bytes() == b"short"
    here.close()


async def test_a_gateway_that_starts_beside_others_removes_what_a_killed_one_left(
    open_site: OpenSite, tmp_path: Path
) -> None:
    files = tmp_path / "batches" / "0" / "files"
    left, whole = files / f"file-{1:024x}.part", files / f"file-{2:024x}"
    async with open_site(processes=2) as first:
        form = aiohttp.FormData()

        async def slowly() -> AsyncIterator[bytes]:
            yield b"x" * 3_000_000
            await asyncio.sleep(60)

        form.add_field("purpose", "batch")
        form.add_field("file", slowly(), filename="f")
        posting = asyncio.create_task(first.session.post(first.url + "/v1/files", data=form))
        await eventually(lambda: len(list(files.glob("*.part"))) == 1)
        left.write_bytes(b"half")
        whole.write_bytes(b"its row may still be written by the other one")
        async with open_site(processes=2):
            await eventually(lambda: not left.exists())
            assert whole.exists() and len(list(files.glob("*.part"))) == 1, "that of the living one stays"
        posting.cancel()
        await asyncio.gather(posting, return_exceptions=True)
        await eventually(lambda: not list(files.glob("*.part")))


async def test_a_batch_that_one_gateway_was_given_is_run_or_cancelled_by_the_other(open_site: OpenSite) -> None:
    async with (
        open_site(processes=2) as runner,
        open_site(processes=2, step_s=0.01) as other,
        client_of(runner) as here,
        client_of(other) as there,
    ):
        batch = await begin(there, job(*[ask()] * 3))
        batch = await ended(there, batch)
        assert batch.status == "completed"
        assert (len(runner.manager.submitted), len(other.manager.submitted)) == (3, 0)
        assert (await here.batches.retrieve(batch.id)).output_file_id == batch.output_file_id

        runner.manager.place = False  # its lines wait
        batch = await begin(there, job(*[ask()] * 3))
        await eventually(lambda: len(runner.manager.submitted) == 6)
        await there.batches.cancel(batch.id)
        assert (await ended(there, batch)).status == "cancelled"
