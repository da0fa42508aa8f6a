"""Each trace format from a tiny file; every wrong file is refused with its name and line."""

from __future__ import annotations

import gzip
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.errors import ConfigError
from cohort.common.workloads.traces import MORE, Trace, TraceRow, open_trace, read_trace, write_trace

MOONCAKE = """\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 2353]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
BURSTGPT = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,a1,2.5,ChatGPT,472,18,490,Conversation log
45,,3,GPT-4,1087,0,1087,Conversation log
118,a1,4,GPT-4,417,276,693,API log
"""
COHORT = """\
arrival_s,prompt_tokens,output_tokens,hash_ids,session
0,6758,500,0 1 2,
1.5,36,29,,7
"""


def write(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_mooncake(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE))
    assert trace.format == "mooncake"
    assert [replace(row, arrival_s=None) for row in trace.rows] == [
        TraceRow(None, 6955, 52, (46, 47, 48)),
        TraceRow(None, 6472, 26, (46, 47, 2353)),
    ]
    assert trace.arrival_s == pytest.approx([0.0, 3.053])


def test_azure(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AZURE))
    assert trace.format == "azure"
    assert [replace(row, arrival_s=None) for row in trace.rows] == [TraceRow(None, 4808, 10), TraceRow(None, 3180, 8)]
    assert trace.arrival_s == pytest.approx([0.0, 0.052], abs=1e-4)


def test_azure_with_zone(tmp_path: Path) -> None:
    """The 2024 traces write the zone."""
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2024-05-10 00:00:0{i}.250000+00:00,10,{i + 1}\n" for i in range(2)
    )
    assert read_trace(write(tmp_path, text)).arrival_s == [0.0, 1.0]


def test_burstgpt_leaves_out_failed_requests(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, BURSTGPT))
    assert trace.format == "burstgpt"
    assert trace.skipped_rows == 1
    assert trace.rows == (TraceRow(0.0, 472, 18, session="a1"), TraceRow(113.0, 417, 276, session="a1"))


def test_burstgpt_without_sessions(tmp_path: Path) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,472,18,490,API log\n"
    assert read_trace(write(tmp_path, text)).rows == (TraceRow(0.0, 472, 18),)


def test_normalised(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, COHORT))
    assert trace.format == "cohort"
    assert trace.rows == (TraceRow(0.0, 6758, 500, (0, 1, 2)), TraceRow(1.5, 36, 29, (), "7"))
    assert trace.arrival_s == [0.0, 1.5]


def test_gzip_is_recognised_by_content(tmp_path: Path) -> None:
    path = tmp_path / "no-suffix"
    path.write_bytes(gzip.compress(COHORT.encode()))
    assert len(read_trace(path).rows) == 2


def test_length_list_has_no_times(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "arrival_s,prompt_tokens,output_tokens\n,42,285\n,19,82\n"))
    assert trace.arrival_s is None
    assert [row.prompt_tokens for row in trace.rows] == [42, 19]


UNSORTED = "arrival_s,prompt_tokens,output_tokens\n9,1,1\n5,2,2\n9,3,3\n"


def test_times_that_go_back_are_refused_unless_sorting_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, UNSORTED, "back.csv")
    with pytest.raises(ConfigError, match=r"back\.csv:3: the arrival time 5 is before 9"):
        read_trace(path)
    trace = read_trace(path, sort=True)
    assert [(row.arrival_s, row.prompt_tokens) for row in trace.rows] == [(0.0, 2), (4.0, 1), (4.0, 3)]


def test_limit_counts_usable_rows(tmp_path: Path) -> None:
    assert [row.output_tokens for row in read_trace(write(tmp_path, BURSTGPT), limit=2).rows] == [18, 276]
    assert len(read_trace(write(tmp_path, MOONCAKE), limit=1).rows) == 1


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (MOONCAKE + '{"timestamp": 1}\n', 3, "input_length"),
        (MOONCAKE + "oops\n", 3, "Mooncake"),
        (AZURE + "not a time,1,2\n", 4, "not a time"),
        (AZURE + "2023-11-16 18:17:05,x,2\n", 4, "ContextTokens"),
        (AZURE + "2023-11-16 18:17:05,1\n", 4, "2 of 3 columns"),
        (BURSTGPT + "200,,1,GPT-4,1.5,2,3,API log\n", 5, "whole number"),
        (COHORT + "2,-4,2,,\n", 4, "negative"),
        (COHORT + "2,4,2,0 x,\n", 4, "'x'"),
        (COHORT + "2,4,-2,,\n", 4, "output_tokens"),
        (COHORT + "nan,4,2,,\n", 4, "nan"),
        (COHORT + "x,4,2,,\n", 4, "'arrival_s': 'x' is not a number"),
        (COHORT + "2,4\n", 4, "'output_tokens' is missing"),
        (MOONCAKE + '{"timestamp": 1, "input_length": -1, "output_length": 2}\n', 3, "input_length: -1"),
        (COHORT + "2,4,2,,,9\n", 4, "6 of 5 columns"),
        (COHORT + f"2,4,2,{'9' * 5000},\n", 4, "column 'hash_ids'"),
        (COHORT + "2,4,2,\u00b2,\n", 4, "column 'hash_ids'"),
        (COHORT + "2,1e300,2,,\n", 4, "column 'prompt_tokens'"),
        (COHORT + f"2,4,2,{'1 ' * 100_000},\n", 4, "not CSV"),
        (COHORT + "1" * (1 << 20) + "\n", 4, "longer than"),
        (MOONCAKE + '{"timestamp": 1, "input_length": "x", "output_length": 2}\n', 3, "input_length"),
        (MOONCAKE + '{"timestamp": 1e999, "input_length": 1, "output_length": 2}\n', 3, "out of range"),
        ("arrival_s,prompt_tokens\n1,2\n", 1, "missing here: output_tokens"),
        (COHORT + ",4,2,,\n", 4, "arrival"),
        ("a,b\n1,2\n", 1, "not a known trace"),
        ("\n", 1, "empty"),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, text: str, line: int, reason: str) -> None:
    path = write(tmp_path, text, "bad.csv")
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert reason in str(caught.value)


def test_a_named_format_must_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an azure trace needs the columns ContextTokens, Generat"):
        read_trace(write(tmp_path, COHORT), "azure")


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(COHORT.encode(), mtime=0)[:-9],
        b"\x1f\x8b garbage",
        b"\xff\xfe\x00binary",
        b"arrival_s,prompt_tokens,output_tokens\n",
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.csv"):
        read_trace(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.csv: cannot be read"):
        read_trace(tmp_path / "absent.csv")


@pytest.mark.parametrize(
    ("lengths", "block"),
    [
        ([(1024, 2), (1025, 3), (100, 1)], 512),  # begun blocks count: Mooncake's rule
        ([(40, 2), (63, 3), (160, 10)], 16),  # full blocks only
        ([(7, 0)], 0),
    ],
)
def test_tokens_per_hash_id_follow_from_the_rows(lengths: list[tuple[int, int]], block: int) -> None:
    rows = tuple(TraceRow(None, prompt, 1, tuple(range(ids))) for prompt, ids in lengths)
    assert Trace("cohort", rows, 0).hash_block() == block


def test_hash_ids_that_fit_no_block_are_refused() -> None:
    rows = (TraceRow(None, 1024, 1, (1, 2)), TraceRow(None, 16, 1, (1, 2, 3, 4)))
    with pytest.raises(ConfigError, match="hash_ids"):
        Trace("cohort", rows, 0).hash_block()


def converted(path: Path, out: Path) -> Trace:
    with open_trace(path) as reader, out.open("w", newline="", encoding="utf-8") as file:
        assert write_trace(reader, file, reader.columns) == len(read_trace(path).rows)
    return read_trace(out)


@pytest.mark.parametrize("text", [MOONCAKE, AZURE, BURSTGPT, COHORT])
def test_a_converted_trace_reads_as_its_source(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    source, found = read_trace(path), converted(path, tmp_path / "ours.csv")
    assert found.format == "cohort"
    assert [replace(row, arrival_s=None) for row in found.rows] == [replace(row, arrival_s=None) for row in source.rows]
    assert found.arrival_s == pytest.approx(source.arrival_s, abs=1e-6)


def test_a_conversion_has_the_columns_that_its_source_fills(tmp_path: Path) -> None:
    converted(write(tmp_path, BURSTGPT), tmp_path / "ours.csv")
    lines = (tmp_path / "ours.csv").read_text().splitlines()
    assert lines == ["arrival_s,prompt_tokens,output_tokens,session", "0,472,18,a1", "113,417,276,a1"]


ROWS = st.builds(
    TraceRow,
    st.none(),
    st.integers(1, 1 << 31),
    st.integers(1, 1 << 31),
    st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple),
    st.text(st.characters(categories=("L", "N", "P")), max_size=6),
    st.text(st.characters(categories=("L", "N", "P")), max_size=6),
)


@given(
    st.lists(st.tuples(st.integers(0, 10**12), ROWS), min_size=1, max_size=8),
    st.booleans(),
    st.sets(st.sampled_from(MORE)),
)
def test_rows_survive_being_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, TraceRow]], timed: bool, kept: set[str]
) -> None:
    """Times are whole microseconds here, which is what a file keeps; the first becomes second 0."""
    drawn.sort(key=lambda pair: pair[0])
    first_us = drawn[0][0]
    rows = [replace(row, arrival_s=at_us / 1e6 if timed else None) for at_us, row in drawn]
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        write_trace(rows, file, [name for name in MORE if name in kept])
    found = read_trace(path)
    lost = {"hash_ids": (), "session": "", "adapter": ""}
    assert [replace(row, arrival_s=None) for row in found.rows] == [
        replace(row, arrival_s=None, **{name: lost[name] for name in MORE if name not in kept}) for row in rows
    ]
    if timed:
        assert found.arrival_s == pytest.approx([(at_us - first_us) / 1e6 for at_us, _ in drawn], abs=1e-6)


def test_a_pass_over_a_trace_holds_one_row_at_a_time(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_s,prompt_tokens,output_tokens\n" + "1,222222,333333\n" * 50_000)
    tracemalloc.start()
    with open_trace(path) as reader, open(os.devnull, "w") as file:
        assert write_trace(reader, file) == 50_000
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < path.stat().st_size / 2
