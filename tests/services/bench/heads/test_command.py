"""`cohort bench train-head`: one command from questions or files to a folder that is served, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cohort.services.bench.__main__ import main
from cohort.services.bench.soak.tiny_model import write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def words(model: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "config.yaml").write_text("kv: {memory_bytes: 8000000}\nmodel: {dtype: float32}\n")
    return [
        "train-head",
        "--model",
        str(model),
        "--config",
        str(tmp_path / "config.yaml"),
        "--threads",
        "1",
        "--length",
        "48",
    ]


def test_it_makes_a_head_and_goes_on(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "questions.jsonl").write_text(
        '{"prompt": "Name a ship."}\n{"text": "The harbour was quiet."}\n'
        '{"messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "In the harbour."}]}\n'
    )
    (tmp_path / "words.txt").write_text("The last ship came in. " * 60)
    output = tmp_path / "head"
    given = ["--texts", str(tmp_path / "questions.jsonl"), str(tmp_path / "words.txt"), "--chats", "4", "--epochs", "2"]
    assert main([*words, "--output", str(output), "--tokens", "30", *given]) == 0
    said = capsys.readouterr().out
    assert "drafts from 30 of " in said and "tokens a step" in said
    config = json.loads((output / "config.json").read_text())
    assert (config["architectures"], config["draft_vocab_size"]) == (["LlamaForCausalLMEagle"], 30)
    assert main([*words, "--output", str(output), "--tokens", "0", "--epochs", "1"]) == 0
    assert "goes on from the head" in capsys.readouterr().out
    assert "draft_vocab_size" not in json.loads((output / "config.json").read_text())


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ([], "give --chats or --texts"),
        (["--texts", "/nowhere"], "/nowhere: neither a folder nor a file ending in"),
        (["--texts", "{folder}/wrong.jsonl"], r"wrong.jsonl:2: not JSON with messages, prompt or text"),
        (["--texts", "{folder}/empty"], "no text in"),
    ],
)
def test_what_is_wrong_is_said(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], refused: str
) -> None:
    (tmp_path / "wrong.jsonl").write_text('{"text": "right"}\n{"question": "wrong"}\n')
    (tmp_path / "empty").mkdir()
    given = [each.format(folder=tmp_path) for each in given]
    assert main([*words, "--output", str(tmp_path / "head"), *given]) == 2
    said = "".join(capsys.readouterr().err.split())  # lines break where the terminal ends
    assert "".join(refused.split()) in said
