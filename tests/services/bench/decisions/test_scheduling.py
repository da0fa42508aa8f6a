"""The measuring command of the prefill order runs and says what it should; how fast is not tested."""

from __future__ import annotations

import json

import pytest

from cohort.services.bench.__main__ import main


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
