"""The two measuring commands of the buckets run and say what they should; how fast is not tested."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from cohort.services.bench.__main__ import main
from cohort.services.bench.decisions import bucket_waste


def test_every_queue_length_and_bucket_bound_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["decisions", "prefill-order", "--waiting", "10", "300", "--buckets", "4", "--rounds", "20", "--json"])
        == 0
    )
    rows = json.loads(capsys.readouterr().out)
    assert [(row["order"], row["waiting"]) for row in rows] == [
        ("bucketserve", 10),
        ("bucketserve", 300),
        ("buckets, at most 4", 10_000),
    ]
    assert all(0.0 < row["add_us"] < row["median_us"] <= row["p99_us"] for row in rows)
    assert rows[2]["buckets"] <= 4


def test_the_baseline_order_can_be_measured_too(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--preset", "disaggregated", "--waiting", "10", "--buckets", "--rounds", "20"]
    assert main(["decisions", "prefill-order", *arguments]) == 0
    assert "disaggregated" in capsys.readouterr().out


def test_the_optimum_wastes_least_where_it_was_chosen() -> None:
    lengths = np.random.default_rng(1).lognormal(5.0, 1.0, 4000)
    points = bucket_waste.compare("synthetic", lengths, 4096)
    assert [point.buckets for point in points] == list(bucket_waste.KS)
    # Chosen on one half and judged on the other of the same distribution
    assert all(point.optimal <= min(point.bisection, point.equal_shares) + 0.01 for point in points)
    assert points[0].optimal == pytest.approx(1 - lengths[2000:].clip(max=4095).mean() / 4096)
    assert all(later.optimal <= earlier.optimal + 0.005 for earlier, later in pairwise(points))
    assert points[-1].optimal < 0.15 < points[0].optimal


def test_the_command_reads_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "lengths.csv"
    rows = "\n".join(f"{i / 10},{10 + i % 50 * 9},5" for i in range(400))
    trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}\n")
    assert main(["decisions", "buckets", str(trace), "--limit", "512", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)
    assert points[0]["trace"] == "lengths"
    assert points[0]["bisection"] == points[0]["optimal"]
    assert points[-1]["optimal"] < 0.05
