"""`cohort traces`: what ships, its numbers, and conversions that are whole or not there."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from cohort.common.workloads.servegen import NAMES
from cohort.common.workloads.trace_files import names, shipped
from cohort.services.cli import __main__ as cli

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,0
2023-11-16 18:17:05.0319600,110,27
"""
OURS = "arrival_s,prompt_tokens,output_tokens\n0,4808,10\n1.052,110,27\n"


def test_list_names_everything_that_can_be_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["traces", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*names(), *NAMES]
    assert {line.split()[1] for line in lines} == {one.licence for one in shipped().values()}


def test_show_has_numbers_and_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["traces", "show", "azure2023_code"]) == 0
    out = capsys.readouterr().out
    assert "8,819 requests" in out and "3,436 s, 2.566 requests/s" in out
    assert "prompt        2,047.8   1,469   5,188   7,436   7,437" in out
    assert shipped()["azure2023_code"].sha256 in out and "CC-BY-4.0" in out and "Splitwise" in out


def test_show_of_drawn_load_and_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["traces", "show", "servegen-m-mid"]) == 0
    out = capsys.readouterr().out
    assert "servegen_windows:" in out and "servegen_length_quantiles:" in out and "seed 0" in out
    path = tmp_path / "t.csv"
    path.write_text(AZURE)
    assert cli.main(["traces", "show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "2 requests, 1 left out" in out and "sha256" not in out


@pytest.mark.parametrize("name", ["servegen_windows", "azure2024"])
def test_show_of_an_unknown_name_lists_the_known(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["traces", "show", name]) == 2
    assert "azure2023_code, " in capsys.readouterr().err


def test_convert_writes_our_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text(AZURE)
    assert cli.main(["traces", "convert", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out == OURS
    assert "azure, 2 requests, 1 without a prompt or an answer left out" in err
    packed = tmp_path / "t.csv.gz"
    assert cli.main(["traces", "convert", str(path), "--to", str(packed)]) == 0
    assert gzip.decompress(packed.read_bytes()).decode() == OURS
    before = packed.read_bytes()
    assert cli.main(["traces", "convert", str(packed), "--to", str(packed)]) == 0
    assert packed.read_bytes() == before, "the same rows are the same bytes, and a file may replace itself"


def test_a_failed_conversion_leaves_what_was_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, to = tmp_path / "t.csv", tmp_path / "out.csv"
    path.write_text(AZURE + "2023-11-16 18:17:06,many,3\n")
    to.write_text("older")
    assert cli.main(["traces", "convert", str(path), "--to", str(to)]) == 2
    assert f"{path}:5: column 'ContextTokens': 'many'" in capsys.readouterr().err
    assert to.read_text() == "older" and sorted(tmp_path.iterdir()) == [to, path]
    for nowhere in (tmp_path / "no" / "x", to / "x"):
        path.write_text(AZURE)
        assert cli.main(["traces", "convert", str(path), "--to", str(nowhere)]) == 2
        assert f"{nowhere}: cannot be written" in capsys.readouterr().err
