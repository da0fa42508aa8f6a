"""What is fetched from a hub, what is refused, and what a hub that fails or lies leaves behind."""

from __future__ import annotations

import hashlib
import io
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from huggingface_hub import constants

from cohort.common.errors import ModelError
from cohort.common.hub.fetch import fetch
from cohort.common.hub.model_source import HubId, find
from cohort.common.json_files import MOST_INDEX_BYTES
from tests.common.hub.fake_hub import COMMIT, FETCHED, FILES, FakeHub, Repository, cached

NAME = HubId("org/name")
WEIGHTS = "model.safetensors"


def fetched(cache: Path, wanted: HubId = NAME, revision: str = "main", *, ask: bool = False) -> set[str]:
    """Names of the files of the snapshot."""
    snapshot = fetch(wanted, revision, cache, with_weights=True, ask=ask)
    return {str(file.relative_to(snapshot)) for file in snapshot.rglob("*") if file.is_file()}


def test_a_connection_that_breaks_is_taken_up_where_it_broke(
    cache: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)  # what is written at a time, else 10 MiB
    hub.repositories["org/name"] = Repository(dict(FILES), breaks={WEIGHTS: [500_000, 800_000]})
    assert fetched(cache) == FETCHED
    ranges = [each for method, path, each in hub.requests if method == "GET" and path.endswith(WEIGHTS)]
    assert ranges == ["", "bytes=500000-", "bytes=800000-"]
    assert (find("org/name").path / WEIGHTS).read_bytes() == FILES[WEIGHTS]


@pytest.mark.parametrize("wrong", ["size", "digest", "config"])
def test_what_differs_from_the_listing_is_removed(cache: Path, hub: FakeHub, wrong: str) -> None:
    repository = hub.repositories["org/name"] = Repository(dict(FILES))
    match wrong:
        case "size":
            repository.listed[WEIGHTS] = len(FILES[WEIGHTS]) + 1
        case "digest":
            repository.digests[WEIGHTS] = hashlib.sha256(b"other").hexdigest()
        case "config":
            repository.listed["config.json"] = 1
    with pytest.raises(ModelError, match=rf"{'config' if wrong == 'config' else 'model'}\.\w+ arrived with .* removed"):
        fetched(cache)
    with pytest.raises(ModelError, match=r"but .*missing"):
        find("org/name")
    repository.listed.clear()
    repository.digests.clear()
    assert fetched(cache) == FETCHED


@pytest.mark.parametrize(
    ("status", "code", "complaint"),
    [
        (403, "GatedRepo", r"gated: accept its licence at http://127.*/org/name, and set HF_TOKEN"),
        (401, "GatedRepo", r"gated: accept its licence"),
        (404, "RepoNotFound", r"no model of http://127.*, or a private one \(there: org/names\): .* or set HF_TOKEN"),
        (401, "", r"\S+ refuses \(401\): set HF_TOKEN"),
        (403, "", r"\S+ refuses \(403\): set HF_TOKEN"),
        (500, "", r"\S+ answers 500: .*; try again later"),
    ],
)
def test_a_refusal_is_one_sentence_with_its_cure(
    cache: Path, hub: FakeHub, status: int, code: str, complaint: str
) -> None:
    cached(cache, "org/names", {})
    hub.repositories["org/name"] = Repository(dict(FILES), status=status, code=code)
    with pytest.raises(ModelError, match=rf"^org/name: {complaint}") as refused:
        fetched(cache)
    assert "\n" not in str(refused.value)


def test_an_id_and_a_revision_that_nobody_has(cache: Path, hub: FakeHub) -> None:
    with pytest.raises(ModelError, match=r"^org/name: no model of "):
        fetched(cache)
    hub.repositories["org/name"] = Repository(dict(FILES))
    with pytest.raises(ModelError, match=r"it has no revision v9: .*--revision"):
        fetched(cache, revision="v9")
    assert fetched(cache, revision=COMMIT) == FETCHED
    assert find("org/name", COMMIT).path.name == COMMIT


def test_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        ModelError, match=r"^org/name: not fetched from http://127\.0\.0\.1:1: ConnectError: .*HF_ENDPOINT"
    ):
        fetched(cache)


def test_the_token_is_shown_to_the_hub(cache: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.repositories["org/name"] = Repository(dict(FILES))
    assert fetched(cache) == FETCHED
    assert hub.tokens == {"Bearer hf_secret"}


def test_pickles_are_never_fetched(cache: Path, hub: FakeHub) -> None:
    hub.repositories["org/name"] = Repository({name: data for name, data in FILES.items() if name != WEIGHTS})
    with pytest.raises(ModelError, match=r"pickles alone \(original/consolidated\.pth\), which are never fetched"):
        fetched(cache)
    assert hub.gets() == {}


def test_shards_are_those_of_the_index(cache: Path, hub: FakeHub) -> None:
    index = b'{"weight_map": {"a": "m-1.safetensors"}}'
    own = {"model.safetensors.index.json": index, "m-1.safetensors": b"x", "consolidated.safetensors": b"y"}
    repository = hub.repositories["org/name"] = Repository({**FILES, **own})
    assert fetched(cache) == FETCHED - {WEIGHTS} | {"model.safetensors.index.json", "m-1.safetensors"}
    shutil.rmtree(cache)
    repository.files["model.safetensors.index.json"] = b'{"weight_map": {"a": "m-2.safetensors"}}'
    with pytest.raises(ModelError, match=r"index\.json names m-2\.safetensors, which the repository does not have"):
        fetched(cache)
    shutil.rmtree(cache)
    repository.files["model.safetensors.index.json"] = b'{"weight_map": {"a": "../m-2.safetensors"}}'
    with pytest.raises(ModelError, match="is no name of a file beside it"):
        fetched(cache)
    shutil.rmtree(cache)
    repository.listed["model.safetensors.index.json"] = MOST_INDEX_BYTES + 1
    before = hub.gets()
    with pytest.raises(ModelError, match=f"has {MOST_INDEX_BYTES + 1} bytes, more than {MOST_INDEX_BYTES}"):
        fetched(cache)
    assert hub.gets() == before


def test_a_gguf_file_alone(cache: Path, hub: FakeHub) -> None:
    ggufs = {name: b"GGUF" for name in ("m.Q4_0.gguf", "m.Q8_0.gguf", "big-00001-of-00002.gguf")}
    hub.repositories["org/name"] = Repository({"README.md": b"#", **ggufs})
    assert fetched(cache, HubId("org/name", "m.Q8_0.gguf")) == {"m.Q8_0.gguf"}
    assert find("org/name:m.Q8_0.gguf").path.name == "m.Q8_0.gguf"
    with pytest.raises(ModelError, match=r"org/name has no m\.gguf; its GGUF files, .*: big.*, m\.Q4_0\.gguf, m\.Q8_0"):
        fetched(cache, HubId("org/name", "m.gguf"))
    with pytest.raises(ModelError, match="GGUF files in parts are not served"):
        fetched(cache, HubId("org/name", "big-00001-of-00002.gguf"))
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor .*; its GGUF files"):
        fetched(cache)
    beside = {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ 1 }}"}
    hub.repositories["org/other"] = Repository({**ggufs, **beside, "config.json": b"{}"})
    assert fetched(cache, HubId("org/other", "m.Q8_0.gguf")) == {"m.Q8_0.gguf", *beside}


def test_room_on_disk_is_looked_at_first(cache: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/name"] = Repository(dict(FILES))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: namedtuple("Usage", "free")(999_999))
    with pytest.raises(ModelError, match=r"1\.0 MB are to be fetched, and .* has 1\.0 MB left; .*HF_HUB_CACHE"):
        fetched(cache)
    assert hub.gets() == {}


@pytest.mark.parametrize("answer", ["y\n", "yes\n", "n\n", "\n", ""])
def test_the_person_at_the_terminal_is_asked(
    cache: Path, hub: FakeHub, answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["org/name"] = Repository(dict(FILES))
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    if answer.startswith("y"):
        assert fetched(cache, ask=True) == FETCHED
    else:
        with pytest.raises(ModelError, match="not fetched"):
            fetched(cache, ask=True)
        assert hub.gets() == {}
    assert "Fetch 4 files, 1.0 MB, from http://127" in capsys.readouterr().err
