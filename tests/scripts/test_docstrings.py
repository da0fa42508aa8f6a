"""The rule of docstrings' beginnings, on texts of each kind."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def docstrings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "scripts" / "docstrings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("kind", "text", "right"),
    [
        ("function", "Return the blocks that a sequence holds.", True),
        ("function", "B3 · BucketServe Eq. 5: Compute the safe memory.", True),
        ("function", "Queue a request.", True),
        ("function", "The blocks that a sequence holds.", False),
        ("function", "Of the blocks, those that are free.", False),
        ("function", "Drafts of each row.", False),
        ("function", "Load of a worker.", False),
        ("function", "Until the worker has ended.", False),
        ("attribute", "Blocks that nobody holds.", True),
        ("attribute", "Whether a step runs.", True),
        ("attribute", "Parked KV, by request.", True),
        ("attribute", "`tokens` of the prompt.", True),
        ("attribute", "Of the request, its owner.", False),
        ("attribute", "Told by the worker.", False),
        ("attribute", "Due; None while nothing waits.", False),
        ("class", "Pool of KV blocks.", True),
        ("class", "Send a tick.", True),
        ("class", "Owns the request.", False),
        ("class", "That which ended.", False),
    ],
)
def test_how_a_docstring_begins(docstrings: ModuleType, kind: str, text: str, right: bool) -> None:
    assert (docstrings.fault(kind, "name", text) == "") is right


def test_init_may_begin_with_a_parameter(docstrings: ModuleType) -> None:
    assert docstrings.fault("function", "__init__", "`clock`: of the process.") == ""
    assert docstrings.fault("function", "other", "`clock`: of the process.") != ""


def test_every_kind_is_found(docstrings: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(
        'class A:\n    """Of it."""\n    x = 1\n    """Of that."""\n    @property\n    def y(self):\n'
        '        """Its y."""\n    async def z(self):\n        """As above."""\n'
    )
    assert docstrings.main([str(tmp_path)]) == 1
    assert [line.split(":")[1] for line in capsys.readouterr().out.splitlines()] == ["2", "4", "7", "9"]
