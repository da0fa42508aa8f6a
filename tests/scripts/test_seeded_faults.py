"""`scripts/seeded_faults`: the faults fit the tree and the record names them. Nightly: what was found is found."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.examples import nightly

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts/seeded_faults"
PARTS = 3
"""Of the nightly run: none may take an hour."""


def _loaded() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("seeded_faults", str(SCRIPT))
    spec = importlib.util.spec_from_loader("seeded_faults", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["seeded_faults"] = module  # dataclasses look their module up
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


script: Any = _loaded()
FAULTS = script.faults_of()
IDS = [fault.id for fault in FAULTS]


def test_there_are_enough_and_the_record_names_exactly_them():
    assert len(FAULTS) >= 60
    assert len(set(IDS)) == len(IDS)
    assert list(json.loads(script.KILLED.read_text())) == IDS


def test_every_fault_fits_its_file():
    for file, faults in groupby(sorted(FAULTS, key=lambda fault: fault.file), key=lambda fault: fault.file):
        text = (ROOT / file).read_text()
        whole = ast.dump(ast.parse(text))
        for fault in faults:
            assert text.count(fault.old) == 1 and fault.why, fault.id
            assert ast.dump(ast.parse(text.replace(fault.old, fault.new), fault.id)) != whole, fault.id


def test_the_tests_of_every_fault_exist():
    killed = json.loads(script.KILLED.read_text())
    for fault in FAULTS:
        assert fault.tests, fault.id
        killer = killed[fault.id]
        named = [killer] if killer not in (None, script.TIME_LIMIT) else []
        files = {test.partition("::")[0] for test in fault.tests}
        assert all(each.partition("::")[0] in files for each in named), f"{fault.id}: the record is of other tests"
        for test in (*fault.tests, *named):
            path, _, name = test.partition("::")
            assert path.startswith("tests/"), fault.id
            text = (ROOT / path).read_text()
            inner = name.split("[")[0].split("::")[-1]  # hypothesis names a state machine's test `runTest`
            assert not name or inner == "runTest" or f"def {inner}(" in text, fault.id


class TestTheCommand:
    """On a tree of one module and one test."""

    @pytest.fixture
    def tree(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (tmp_path / "common").mkdir()
        (tmp_path / "tests/faults").mkdir(parents=True)
        (tmp_path / "common/adding.py").write_text(
            "def add(a, b):\n    return a + b\n\n\ndef less(a, b):\n    return a < b\n"
        )
        (tmp_path / "tests/test_adding.py").write_text(
            "from common.adding import add\n\n\ndef test_adds():\n    assert add(1, 2) == 3\n"
        )
        (tmp_path / "tests/faults/faults.yaml").write_text(
            "\n".join(
                [
                    *("- id: subtracts", "  file: common/adding.py", "  old: return a + b", "  new: return a - b"),
                    *("  why: wrong sums", "  tests: [tests/test_adding.py]"),
                    *("- id: at-most", "  file: common/adding.py", "  old: return a < b", "  new: return a <= b"),
                    *("  why: nobody looks", "  tests: [tests/test_adding.py]"),
                    *("- id: never-ends", "  file: common/adding.py", "  old: return a + b"),
                    *("  new: __import__('time').sleep(60)", "  why: hangs", "  tests: [tests/test_adding.py]"),
                ]
            )
        )
        monkeypatch.setattr(script, "ROOT", tmp_path)
        monkeypatch.setattr(script, "PARTS", ("common", "tests"))
        read = script.faults_of
        monkeypatch.setattr(script, "faults_of", lambda: read(tmp_path / "tests/faults/faults.yaml"))
        monkeypatch.setattr(script, "KILLED", tmp_path / "none.json")
        return tmp_path

    def test_it_says_what_found_each_and_leaves_the_tree_alone(self, tree: Path, capsys: pytest.CaptureFixture[str]):
        before = (tree / "common/adding.py").read_text()
        record = tree / "record.json"
        common = ["--expect", str(tree / "none.json"), "--json", str(record)]
        assert script.main([*common, "--only", "subtracts", "at-most"]) == 0
        assert script.main([*common, "--only", "never-ends", "--limit", "4"]) == 0
        killer = "tests/test_adding.py::test_adds"
        assert json.loads(record.read_text()) == {"subtracts": killer, "at-most": None, "never-ends": "time limit"}
        said = capsys.readouterr().out
        assert f"subtracts: killed by {killer}" in said
        assert "at-most: SURVIVED" in said
        assert "1 of 2 found" in said and "1 of 1 found" in said
        assert (tree / "common/adding.py").read_text() == before

    def test_a_survivor_that_was_found_before_fails_it(
        self, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        expected = tree / "expected.json"
        expected.write_text(json.dumps({"at-most": "tests/test_adding.py::test_less"}))
        monkeypatch.setattr(script, "judge_all", lambda faults, *_: [script.Verdict(it, None, 0.1) for it in faults])
        assert script.main(["--only", "at-most", "--expect", str(expected)]) == 1
        assert "at-most survives and was found before, by tests/test_adding.py::test_less" in capsys.readouterr().out

    def test_red_tests_judge_nothing(self, tree: Path):
        (tree / "tests/test_adding.py").write_text("def test_red():\n    assert False\n")
        with pytest.raises(SystemExit, match=r"without any fault this fails: tests/test_adding\.py::test_red"):
            script.main(["--only", "subtracts"])


@pytest.mark.skipif(not nightly(), reason="minutes of tests for each part: scripts/test --nightly")
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_what_was_found_is_found(part: int):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--only", *IDS[part::PARTS]], capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stdout + done.stderr
