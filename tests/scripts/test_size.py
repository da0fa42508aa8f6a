"""The cap: what is counted, and what is said where a part is larger than it may be."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path, PurePosixPath
from types import ModuleType

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def size() -> ModuleType:
    spec = importlib.util.spec_from_file_location("size", ROOT / "scripts" / "size.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lines_files_and_words_are_counted_by_part(size: ModuleType, tmp_path: Path) -> None:
    texts = {
        "common/a.py": "x = 1\ny = 2\n",
        "common/room/b.py": "z = 3\n",
        "common/room/c.py": "",
        "tests/test_a.py": "\n\n\n",
        "setup.py": "one\n",
        "configs/a.yaml": "a: 1\nb: 2\n",
        "kernels/csrc/k.cpp": "int a;\n",
        "docs/page.md": "four words of prose\n",
        "docs/size.json": "{}\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    sizes = size.measured(tmp_path, [PurePosixPath(name) for name in texts])
    assert sizes.pop("options") > sizes.pop("settings of mechanisms") > 0
    assert sizes == {
        "lines of Python": 1,
        "lines of YAML and JSON": 2,
        "lines of common: Python": 3,
        "lines of other languages": 1,
        "lines of tests: Python": 3,
        "Python files in the widest folder": 2,
        "words of Markdown": 4,
    }


def test_what_git_ignores_and_links_are_not_counted(size: ModuleType, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=60)
    (tmp_path / ".gitignore").write_text("made.py\n")
    (tmp_path / "made.py").write_text("")
    (tmp_path / "new.py").write_text("")
    (tmp_path / "link.py").symlink_to("new.py")
    assert [str(file) for file in size.tracked(tmp_path)] == [".gitignore", "new.py"]


def test_an_option_is_a_leaf(size: ModuleType) -> None:
    class Inner(msgspec.Struct):
        a: int = 1
        b: tuple[int, ...] = ()

    class Outer(msgspec.Struct):
        inner: Inner = msgspec.field(default_factory=Inner)
        c: str = ""

    assert size.options(Outer()) == 3


def test_a_size_over_its_cap_and_one_without_are_named(size: ModuleType) -> None:
    found = size.above({"a": 2, "b": 1, "c": 1}, {"a": 1, "b": 1})
    assert [line.split(":")[0] for line in found] == ["a", "c"]


def test_the_tree_is_within_its_caps() -> None:
    command = [sys.executable, "-P", str(ROOT / "scripts" / "size.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_no_cap_is_left_of_a_part_that_is_gone(size: ModuleType) -> None:
    caps = json.loads((ROOT / "docs" / "size.json").read_text(encoding="utf-8"))
    assert set(caps) == set(size.measured(ROOT, size.tracked(ROOT)))
