"""Compiled modules are found only while every source that they were made from is the same."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from cohort.common.process.compiled import MANIFEST, SUFFIX, Compiled, manifest, refusal, use

NAME = "cohort.common.never"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of one module, made from two sources beside it."""
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    made = tmp_path / "compiled"
    made.mkdir()
    (made / f"{NAME}{SUFFIX}").touch()
    (made / MANIFEST).write_text(json.dumps(manifest(str(tmp_path), ["a.py", "b.py"])))
    return made


@pytest.fixture(autouse=True)
def finders(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    monkeypatch.delenv("COHORT_COMPILED", raising=False)
    monkeypatch.setattr(sys, "meta_path", found := list(sys.meta_path))
    return found


def used(folder: Path, finders: list[object]) -> bool:
    before = len(finders)
    use(str(folder.parent), str(folder))
    return len(finders) > before


def test_used_while_the_sources_are_the_same(folder: Path, finders: list[object], capfd: pytest.CaptureFixture[str]):
    assert used(folder, finders) and isinstance(finders[0], Compiled)
    spec = finders[0].find_spec(NAME, None)
    assert spec is not None and spec.origin == str(folder / f"{NAME}{SUFFIX}")
    assert finders[0].find_spec("cohort.common.other", None) is None
    assert capfd.readouterr().err == ""


def test_touched_files_are_the_same(folder: Path, finders: list[object]):
    os.utime(folder.parent / "b.py", ns=(1, 1))
    assert used(folder, finders)


def edit(folder: Path) -> None:
    (folder.parent / "b.py").write_text("# c.py\n")  # as long as before


def edit_at_the_same_time(folder: Path) -> None:
    file = folder.parent / "b.py"
    before = file.stat()
    file.write_text("# longer\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def remove(folder: Path) -> None:
    (folder.parent / "b.py").unlink()


def made_for_another_python(folder: Path) -> None:
    found = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**found, "python": ".cpython-39.so"}))


def half(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:-9])


@pytest.mark.parametrize(
    "change, why",
    [
        (edit, "1 of their sources changed since, b.py for one"),
        (edit_at_the_same_time, "1 of their sources changed since, b.py for one"),
        (remove, "1 of their sources changed since, b.py for one"),
        (made_for_another_python, f"they are for .cpython-39.so, this Python takes {SUFFIX}"),
        (half, "they are incomplete"),
        (lambda folder: (folder / MANIFEST).unlink(), "they are incomplete"),
    ],
)
def test_refused_aloud(change, why: str, folder: Path, finders: list[object], capfd: pytest.CaptureFixture[str]):
    change(folder)
    assert refusal(str(folder.parent), str(folder)) == why
    assert not used(folder, finders)
    said = capfd.readouterr().err
    assert said == f"cohort: compiled modules are not used: {why} (`scripts/compile` anew, or `--remove`)\n"


def test_left_out_by_the_environment(folder: Path, finders: list[object], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COHORT_COMPILED", "no")
    assert not used(folder, finders)
