"""Gateways of one port share a folder of batches; one of them runs the batches, and another when that one ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from cohort.common.config import BatchConfig
from cohort.common.errors import ConfigError
from cohort.services.gateway.batch_files import BatchFolder
from tests.services.gateway.batch_client import ask, begin, client_of, ended, job
from tests.services.gateway.conftest import OpenSite, eventually


def folder(path: Path, *, shared: bool) -> BatchFolder:
    return BatchFolder(BatchConfig(folder=str(path)), 8000, shared=shared)


def test_the_folder_of_a_single_gateway_is_its_own(tmp_path: Path) -> None:
    first = folder(tmp_path, shared=False)
    first.open()
    assert first.alone and first.may_run()
    with pytest.raises(ConfigError, match="another gateway uses"):
        folder(tmp_path, shared=False).open()
    first.close()
    second = folder(tmp_path, shared=False)
    second.open()
    assert second.alone
    second.close()


def test_of_several_the_first_cleans_up_and_one_at_a_time_runs(tmp_path: Path) -> None:
    first, second = (folder(tmp_path, shared=True) for _ in range(2))
    first.open()
    assert first.alone, "what a killed process left is cleaned up by one that has the folder alone"
    first.admit_others()
    second.open()
    assert not first.alone and not second.alone
    assert second.may_run() and second.may_run() and not first.may_run()
    second.close()
    assert first.may_run()
    with pytest.raises(ConfigError, match="another gateway uses"):
        folder(tmp_path, shared=False).open()
    first.close()


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
