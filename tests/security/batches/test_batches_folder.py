"""Attack: a batch folder that others can read, that loses what it does not know, and whose database ends the gateway.

The folder is set to one that holds other files; the database is set aside, as an operator does who wants a fresh
start; it is overwritten with rubbish; the folder was created with the umask's mode. Nothing that the gateway did not
make may be deleted, contents survive the loss of their database, and generation goes on without batches.
"""

from __future__ import annotations

import os
import random
import sqlite3
from pathlib import Path

import pytest

from cohort.common.errors import ConfigError
from tests.services.gateway.batch_client import ask, begin, client_of, ended, job
from tests.services.gateway.conftest import OpenSite, Site, model_dir, open_site  # noqa: F401


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where `open_site` puts the batches."""
    return tmp_path / "batches" / "0"


def set_aside(folder: Path) -> None:
    for name in folder.glob("batches.sqlite*"):
        name.rename(folder.parent / name.name)


async def test_files_of_others_stay(open_site: OpenSite, folder: Path) -> None:  # noqa: F811
    """Also those whose names look almost like ours, folders and links, and a half-written name that is not ours."""
    files = folder / "files"
    files.mkdir(parents=True)
    outside = folder.parent / "outside"
    outside.write_text("kept")
    names = ["mydata.txt", "file-1", "file-1.part", "notes.part", f"file-{'A' * 24}", f"file-{1:024x}.jsonl", ".hidden"]
    for name in names:
        (files / name).write_text("precious")
    (files / f"file-{2:024x}").mkdir()
    (files / f"file-{3:024x}.part").symlink_to(outside)
    before = sorted(files.iterdir())
    for _ in range(2):  # the second start finds a database that is not new
        async with open_site() as site, client_of(site) as client:
            file = await client.files.create(file=b"x", purpose="batch")
            await client.files.delete(file.id)
    assert sorted(files.iterdir()) == before and outside.read_text() == "kept"


async def test_half_written_contents_go_whatever_the_database_knows(open_site: OpenSite, folder: Path) -> None:  # noqa: F811
    (folder / "files").mkdir(parents=True)
    for suffix in ("", "-output", "-error"):
        (folder / "files" / f"file-{7:024x}{suffix}.part").write_bytes(b"half")
    async with open_site():
        assert list((folder / "files").iterdir()) == [] and not (folder / "files.lost").exists()


async def test_contents_outlive_a_database_that_was_set_aside(open_site: OpenSite, folder: Path) -> None:  # noqa: F811
    async with open_site() as site, client_of(site) as client:
        batch = await ended(client, await begin(client, job(ask())))
    before = {path.name: path.read_bytes() for path in (folder / "files").iterdir()}
    assert set(before) == {batch.input_file_id, batch.output_file_id}
    for round_ in (1, 2):  # and a second time, with the same names
        set_aside(folder)
        async with open_site() as site:
            assert (await site.get("/v1/files"))[1]["data"] == []
        lost = folder / "files.lost"
        assert {path.name: path.read_bytes() for path in lost.iterdir() if len(path.suffix) == 0} == before
        assert len(list(lost.iterdir())) == len(before) * round_
        for name, data in before.items():
            (folder / "files" / name).write_bytes(data)
    for path in (lost, *lost.iterdir()):
        assert path.stat().st_mode & 0o077 == 0


def open_to_all(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def modes_of(folder: Path) -> dict[str, tuple[bool, int]]:
    """Whether it is a folder, and its mode, by name."""
    paths = [path for path in (folder, *folder.rglob("*")) if path.name != "lock"]
    return {path.name: (path.is_dir(), path.stat().st_mode & 0o7777) for path in paths}


async def test_modes_are_private_also_in_a_folder_that_was_there(open_site: OpenSite, folder: Path) -> None:  # noqa: F811
    async with open_site() as site, client_of(site) as client:
        await ended(client, await begin(client, job(ask())))
    open_to_all(folder)
    before = os.umask(0)
    try:
        async with open_site() as site, client_of(site) as client:
            await ended(client, await begin(client, job(ask())))
            modes = modes_of(folder)
    finally:
        os.umask(before)
    assert {"batches.sqlite", "batches.sqlite-wal", "files"} < set(modes) and len(modes) >= 9
    assert {name: oct(mode) for name, (is_dir, mode) in modes.items() if mode != (0o700 if is_dir else 0o600)} == {}


def share(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o1777)


async def test_a_folder_that_users_share_is_refused(open_site: OpenSite, folder: Path) -> None:  # noqa: F811
    share(folder)
    with pytest.raises(ConfigError, match=r"state\.folder: .*shared with other users"):
        async with open_site():
            pass
    assert modes_of(folder)[folder.name] == (True, 0o1777), "not made private: others work there"


async def assert_serves_without_batches(site: Site) -> None:
    assert (await site.get("/ready"))[0] == 200
    assert (await site.post("/v1/completions", ask()))[0] == 200
    for path in ("/v1/files", "/v1/batches", "/v1/files/file-x/content", "/v1/batches/batch_x"):
        status, body = await site.get(path)
        assert status == 503 and "database" in body["error"]["message"]
        assert str(site.batches) not in body["error"]["message"]
    assert (await site.post("/v1/batches", {}))[0] == 503
    async with site.session.get(site.url + "/metrics") as response:
        assert 'cohort_batch_store_usable{instance="gateway",model_name="tiny"} 0.0' in await response.text()


@pytest.mark.parametrize("damage", ["rubbish", "empty header", "a folder"])
async def test_a_damaged_database_costs_batches_not_the_gateway(
    open_site: OpenSite,  # noqa: F811
    folder: Path,
    damage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with open_site() as site, client_of(site) as client:
        await ended(client, await begin(client, job(ask())))
    set_aside(folder)
    database = folder / "batches.sqlite"
    match damage:
        case "rubbish":
            database.write_bytes(random.Random(0).randbytes(50_000))
        case "empty header":
            database.write_bytes(b"SQLite format 3\0" + bytes(5000))
        case "a folder":
            database.mkdir()
    before = sorted((path, path.stat().st_size) for path in (folder / "files").iterdir())
    capsys.readouterr()
    async with open_site() as site:
        await assert_serves_without_batches(site)
    said = "".join(capsys.readouterr())
    assert "NOT served" in said and str(database) in said and "files.lost" in said
    assert sorted((path, path.stat().st_size) for path in (folder / "files").iterdir()) == before


async def test_damage_in_the_middle_is_found_before_anything_is_deleted(open_site: OpenSite, folder: Path) -> None:  # noqa: F811
    """Pages of the table of files are gone: the database opens and names fewer files than there are."""
    async with open_site() as site, client_of(site) as client:
        kept = [(await client.files.create(file=(f"{n:0>250}", b"x"), purpose="batch")).id for n in range(100)]
    database = folder / "batches.sqlite"
    page = 4096
    with sqlite3.connect(database) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        pages = (
            [row[0] for row in db.execute("SELECT pageno FROM dbstat WHERE name = 'files' AND pagetype = 'leaf'")]
            if (has_dbstat(db))
            else list(range(12, database.stat().st_size // page))
        )
    db.close()
    with database.open("r+b") as file:
        for number in pages[1:]:
            file.seek((number - 1) * page)
            file.write(b"\x0d" + bytes(page - 1))  # leaves without a row
    async with open_site() as site:
        await assert_serves_without_batches(site)
    assert {path.name for path in (folder / "files").iterdir()} == set(kept)


def has_dbstat(db: sqlite3.Connection) -> bool:
    return any("DBSTAT" in row[0] for row in db.execute("PRAGMA compile_options"))
