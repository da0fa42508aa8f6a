"""The rows among which reproduced ones are counted stay those that were chosen before any verdict changed."""

from __future__ import annotations

import hashlib
from collections import Counter

import msgspec

from cohort.services.simulator.figures.figure import FOLDER, shipped_denominator
from cohort.services.simulator.reproduce.reproduce import all_figures


def test_the_denominator_is_the_one_that_was_laid_down_and_each_of_its_rows_is_a_figure() -> None:
    laid_down = msgspec.yaml.decode((FOLDER / "denominator.yaml").read_bytes())
    rows, renamed = laid_down["rows"], laid_down["renamed"]
    digest = hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest()
    assert (len(set(rows)), digest[:16]) == (121, "6b012b1cfd6c6780")
    assert set(renamed) <= set(rows)
    now = shipped_denominator()
    assert [name for name, times in Counter(now).items() if times > 1] == []
    assert set(now) <= {figure.id for figure in all_figures()}
