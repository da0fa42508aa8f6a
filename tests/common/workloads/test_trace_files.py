"""What ships in `configs/traces`: whole, as described, licensed, and in every installation."""

from __future__ import annotations

import gzip
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

from cohort.common.errors import ConfigError
from cohort.common.workloads import trace_files
from cohort.common.workloads.trace_files import FOLDER, names, shipped, shipped_file, trace_file
from cohort.common.workloads.traces import read_trace

ROOT = FOLDER.parent.parent
FREE = {"CC-BY-4.0", "Apache-2.0", "MIT"}

NUMBERS = {
    "azure2023_code": (8_819, 3_435.948, (2_047.8, 1_469, 7_436, 7_437), (27.9, 13, 251, 1_899)),
    "azure2023_conv": (14_453, 2_450.958, (1_188.8, 1_015, 4_121, 14_050), (201.8, 115, 598, 1_000)),
    "mooncake_conversation": (12_031, 3_536.999, (12_035.1, 6_909, 85_400, 126_195), (342.6, 350, 1_119, 2_000)),
    "burstgpt1_head": (268, 35_215.0, (599.2, 435, 1_923, 1_994), (291.2, 249, 1_493, 2_019)),
    "arxiv_summarization_4k": (28_257, None, (2_588.1, 2_730, 3_933, 4_054), (291.4, 167, 3_271, 4_056)),
}
"""Rows, seconds to the last, and mean, p50, p99, maximum of prompts and outputs, counted when the files were made."""


def test_the_folder_holds_what_the_catalogue_lists() -> None:
    assert {path.name.removesuffix(".csv.gz") for path in FOLDER.glob("*.gz")} == set(shipped())
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_300_000


@pytest.mark.parametrize("name", list(shipped()))
def test_every_file_is_whole_as_described_and_may_be_passed_on(name: str) -> None:
    one = shipped()[name]
    header, _, _ = gzip.decompress(shipped_file(name).read_bytes()).partition(b"\n")
    assert header.decode().split(",") == one.columns
    assert one.licence in FREE and one.attribution and "commit" in one.source
    assert f"{name}.csv.gz" in (FOLDER / "LICENSES.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", list(NUMBERS))
def test_every_trace_has_the_numbers_that_were_counted(name: str) -> None:
    rows, span_s, *lengths = NUMBERS[name]
    trace = read_trace(shipped_file(name))
    assert (len(trace.rows), trace.skipped_rows) == (rows, 0)
    assert (trace.arrival_s or [None])[-1] == (None if span_s is None else pytest.approx(span_s, abs=1e-3))
    columns = [row.prompt_tokens for row in trace.rows], [row.output_tokens for row in trace.rows]
    for tokens, (mean, *places) in zip(columns, lengths, strict=True):
        assert np.mean(tokens) == pytest.approx(mean, abs=0.051)
        assert np.percentile(tokens, (50, 99, 100)) == pytest.approx(places, abs=0.6)
    assert trace.hash_block() == shipped()[name].block_tokens


def test_every_name_is_counted() -> None:
    assert sorted(names()) == sorted(NUMBERS)


def test_a_damaged_file_and_a_missing_one_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = shipped()
    monkeypatch.setattr(trace_files, "FOLDER", tmp_path)
    shipped_file.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"burstgpt1_head\.csv\.gz: cannot be read"):
            shipped_file("burstgpt1_head")
        (tmp_path / "burstgpt1_head.csv.gz").write_bytes(gzip.compress(b"arrival_s,prompt_tokens,output_tokens\n0,1,1"))
        with pytest.raises(ConfigError, match="not the file that came with Cohort"):
            trace_file("burstgpt1_head")
    finally:
        shipped_file.cache_clear()
    assert "burstgpt1_head" in known


def test_a_file_here_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("azure2023_code", "azure2023_code.csv.gz"):
        assert trace_file(text) == FOLDER / "azure2023_code.csv.gz"
    Path("azure2023_code").write_text("arrival_s,prompt_tokens,output_tokens\n")
    assert trace_file("azure2023_code") == Path("azure2023_code")
    for text in ("servegen_windows", "azure", ""):
        assert trace_file(text) is None


def test_wheels_and_images_carry_the_traces() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["cohort"]
    left_out = (ROOT / ".dockerignore").read_text().split()
    for path in FOLDER.iterdir():
        name = f"configs/traces/{path.name}"
        assert any(fnmatch(name, pattern) for pattern in patterns), name
        assert not any(fnmatch(name, f"{pattern}*") for pattern in left_out), name
