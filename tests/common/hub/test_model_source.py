"""What a model's name means, and what is said where it means nothing here."""

from __future__ import annotations

import hashlib
import io
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock
from huggingface_hub import constants

from cohort.common.config import Config, ModelConfig
from cohort.common.errors import ConfigError, ModelError
from cohort.common.hub.leftovers import take_up
from cohort.common.hub.model_source import HubId, find, located, permission, shown_name
from tests.common.hub.fake_hub import COMMIT, FETCHED, FILES, FakeHub, Repository, cached, safetensors
from tests.examples import another_of_its_kind

SERVED = {name: FILES[name] for name in FETCHED}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("Qwen/Qwen3-0.6B", HubId("Qwen/Qwen3-0.6B")),
        ("gpt2", HubId("gpt2")),
        ("a/b:c/d.Q8_0.gguf", HubId("a/b", "c/d.Q8_0.gguf")),
        *((path, None) for path in ("/m", "./m", "../m", "a/b/c", "~/m", "a/..", "a/b--c", "a/" + "b" * 96, "", "é/b")),
    ],
)
def test_an_id_is_told_from_a_path(name: str, wanted: HubId | None) -> None:
    assert HubId.of(name) == wanted


@pytest.mark.parametrize("name", ["a/b:Q8_0", "a/b:../x.gguf", "a/b:/x.gguf"])
def test_after_the_colon_stands_a_gguf_file(name: str) -> None:
    with pytest.raises(ModelError, match=r"a/b:FILE\.gguf"):
        HubId.of(name)


def test_a_folder_comes_before_the_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cached(cache, "org/name", SERVED)
    monkeypatch.chdir(tmp_path)
    found = find("org/name")
    assert (found.path, found.name) == (snapshot, "org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    found = find("org/name")
    assert (found.path, found.name) == (tmp_path / "org" / "name", "")
    assert find("./absent").path == tmp_path / "absent"


def test_clients_know_it_by_the_id_as_given(cache: Path) -> None:
    snapshot = cached(cache, "org/name", SERVED)
    config = located(Config(model=ModelConfig(path="org/name")))
    assert (config.model.path, config.model.served_name) == (str(snapshot), "org/name")
    named = located(Config(model=ModelConfig(path="org/name", served_name="mine")))
    assert named.model.served_name == "mine"
    assert located(Config()) == Config()
    assert (shown_name(snapshot), shown_name(cache / "mine")) == ("org/name", "mine")  # `root` of /v1/models


def test_a_revision_is_a_branch_or_a_commit(cache: Path) -> None:
    snapshot = cached(cache, "org/name", SERVED, revision="v1.0")
    assert find("org/name", "v1.0").path == find("org/name", COMMIT).path == snapshot
    with pytest.raises(ModelError, match=r"not in Hugging Face's cache .* at revision v2"):
        find("org/name", "v2")
    with pytest.raises(ModelError, match=r"^model\.revision: '\.\./x' is no branch"):
        find("org/name", "../x")


def test_a_gguf_file_keeps_its_name_and_its_neighbours(cache: Path) -> None:
    snapshot = cached(cache, "org/name", {"m.Q8_0.gguf": b"GGUF", "tokenizer.json": b"{}"})
    found = find("org/name:m.Q8_0.gguf")
    assert (found.path, found.name) == (snapshot / "m.Q8_0.gguf", "org/name:m.Q8_0.gguf")
    with pytest.raises(ModelError, match=r"but m\.Q4_0\.gguf is missing"):
        find("org/name:m.Q4_0.gguf")


@pytest.mark.parametrize("absent", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_download_that_was_broken_off_is_not_served(cache: Path, absent: str) -> None:
    cached(cache, "org/name", {name: data for name, data in SERVED.items() if name != absent})
    with pytest.raises(ModelError, match=r"in Hugging Face's cache, but .* (is|are) missing.*--download .*fetches"):
        find("org/name")
    if absent == "model.safetensors":
        assert find("org/name", with_weights=False).name == "org/name"


def test_every_shard_of_an_index_is_wanted(cache: Path) -> None:
    index = b'{"weight_map": {"a": "m-1-of-2.safetensors", "b": "m-2-of-2.safetensors"}}'
    files = {**SERVED, "model.safetensors.index.json": index, "m-1-of-2.safetensors": safetensors(b"x")}
    snapshot = cached(cache, "org/name", files)
    with pytest.raises(ModelError, match=r"1 of 2 files of weights are missing \(m-2-of-2\.safetensors\)"):
        find("org/name")
    (snapshot / "m-2-of-2.safetensors").symlink_to("../../blobs/gone")
    with pytest.raises(ModelError, match=r"links to \.\./\.\./blobs/gone, which is not there"):
        find("org/name")


def test_what_is_not_there_is_one_sentence_with_its_cure(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(cache, "Qwen/Qwen3-0.6B", SERVED)
    with pytest.raises(
        ModelError,
        match=r"no such folder, .*\(there: Qwen/Qwen3-0\.6B\); --download \(COHORT_DOWNLOAD=1\) fetches it from ",
    ):
        find("qwen/qwen3-0.6")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        find("org/other", download="yes")


def test_who_permits_a_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert (permission(True), permission(False)) == ("yes", "no")
    monkeypatch.setenv("COHORT_DOWNLOAD", "1")
    assert permission(False) == "yes"
    monkeypatch.setenv("COHORT_DOWNLOAD", "true")
    with pytest.raises(ConfigError, match="write 1"):
        permission(False)
    monkeypatch.setenv("COHORT_DOWNLOAD", "")
    for stream in ("stdin", "stderr"):
        terminal = io.StringIO()
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, stream, terminal)
    assert permission(False) == "ask"
    monkeypatch.setenv("COHORT_DOWNLOAD", "0")
    assert permission(False) == "no"


# -- in a process of its own, from a hub on loopback -------------------------------------------------------------


@pytest.mark.pipeline
def test_a_model_is_fetched_once_and_found_from_then_on(cache: Path, hub: FakeHub) -> None:
    hub.repositories["org/name"] = Repository(dict(FILES))
    found = find("org/name", download="yes")
    assert {file.name for file in found.path.iterdir()} == FETCHED
    assert (found.path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    asked = len(hub.requests)
    assert find("org/name") == find("org/name", download="yes") == found
    assert len(hub.requests) == asked


@pytest.mark.pipeline
def test_a_cache_that_cannot_be_written_is_read_and_ours_takes_what_is_fetched(
    cache: Path, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's: mounted read-only. Root may write anywhere, so the answer is given by hand."""
    cached(cache, "org/there", SERVED)
    hub.repositories["org/name"] = Repository(dict(FILES))
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(cache)))
    found = find("org/name", download="yes")
    assert found.path.is_relative_to(tmp_path / "cohort" / "hub")
    assert find("org/name") == found and find("org/there").path.is_relative_to(cache)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "case",
    [
        "goes on",
        pytest.param("other bytes", marks=another_of_its_kind()),
        pytest.param("refused", marks=another_of_its_kind()),
    ],
)
def test_a_process_that_is_killed_is_gone_on_from(cache: Path, hub: FakeHub, case: str) -> None:
    """The next one asks for the rest of the rest alone; for the whole file, where the rest does not fit what is there,
    or cannot be had. Nothing is left over."""
    index = b'{"weight_map": {"a": "m-1-of-2.safetensors", "b": "m-2-of-2.safetensors"}}'
    first, second = safetensors(bytes(200_000)), safetensors(random.Random(1).randbytes(30_000_000))
    shards = {"m-1-of-2.safetensors": first, "m-2-of-2.safetensors": second}
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors.index.json": index, **shards}
    repository = Repository(files, breaks={"m-2-of-2.safetensors": [25_000_000]})
    hub.repositories["org/name"] = repository
    hub.stall = True
    command = [sys.executable, "-P", "-m", "cohort.common.hub.fetch", "org/name", "main", str(cache)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    folder = cache / "models--org--name"
    snapshot = folder / "snapshots" / COMMIT
    written = 2 * constants.DOWNLOAD_CHUNK_SIZE
    deadline_s = time.monotonic() + 60.0
    while not (snapshot / "m-1-of-2.safetensors").exists() or written not in sizes(folder):
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.05)
    process.kill()
    assert process.communicate()[0] == ""
    hub.stall = False
    with pytest.raises(ModelError, match=r"1 of 2 files of weights are missing \(m-2-of-2"):
        find("org/name")
    if case == "other bytes":
        [leftover] = (folder / "blobs").glob("*.incomplete")
        leftover.write_bytes(bytes(written))
    repository.without_ranges = case == "refused"
    hub.requests.clear()
    assert find("org/name", download="yes").path == snapshot
    asked = [
        (path.rpartition("/")[2], each) for method, path, each in hub.requests if method == "GET" and "resolve" in path
    ]
    whole = [] if case == "goes on" else [("m-2-of-2.safetensors", "")]
    assert asked == [("m-2-of-2.safetensors", f"bytes={written}-"), *whole]
    assert (snapshot / "m-2-of-2.safetensors").read_bytes() == second
    assert sorted(sizes(folder)) == sorted({len(data) for data in files.values()})


@pytest.mark.pipeline
def test_a_file_that_another_process_fetches_is_left_to_it(cache: Path, hub: FakeHub) -> None:
    """Its temporary file is as long as ever when the second begins."""
    hub.repositories["org/name"] = Repository(dict(FILES))
    digest = hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    folder = cache / "models--org--name"
    (folder / "blobs").mkdir(parents=True)
    others = folder / "blobs" / f"{digest}.0a0b0c0d.incomplete"
    others.write_bytes(FILES["model.safetensors"][:1000])
    (cache / ".locks" / folder.name).mkdir(parents=True)
    with FileLock(cache / ".locks" / folder.name / f"{digest}.lock"):
        take_up(folder, "org/name", "model.safetensors", COMMIT, size=len(FILES["model.safetensors"]), sha256=digest)
    assert others.stat().st_size == 1000 and hub.requests == []


def sizes(folder: Path) -> list[int]:
    """Bytes of the files of a repository in the cache, whole or not."""
    return [file.stat().st_size for file in (folder / "blobs").iterdir()]
