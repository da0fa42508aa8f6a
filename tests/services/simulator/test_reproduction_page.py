"""The page of reproduced figures: new results replace their system's sections and leave the others."""

from __future__ import annotations

import pytest

from cohort.services.simulator.figures import bucketserve as figures
from cohort.services.simulator.reproduce import Reproduced, markdown


def result(system: str, figure: str, ours: float) -> Reproduced:
    return Reproduced(f"{system}-{figure}", system, figure, "w", "b", "m", "x", 2.0, ours, ours / 2.0, "n")


def test_one_system_anew_leaves_the_others() -> None:
    first = markdown(
        [result("baselines", "Table 1", 2.0), result("ecoserve", "Fig. 1", 1.0), result("ecoserve", "Fig. 2", 1.0)]
    )
    second = markdown([result("ecoserve", "Fig. 1", 3.0)], first)
    assert second == markdown([result("baselines", "Table 1", 2.0), result("ecoserve", "Fig. 1", 3.0)])
    assert markdown([result("bucketserve", "Fig. 5", 1.0)], second) == markdown(
        [result("baselines", "Table 1", 2.0), result("bucketserve", "Fig. 5", 1.0), result("ecoserve", "Fig. 1", 3.0)]
    )


def test_the_page_on_disk_is_one_of_ours() -> None:
    page = markdown([result("baselines", "Table 1", 2.0), result("baselines", "Table 2", 2.0)])
    assert markdown([], page) == page


def test_remarks_on_a_paper_stay_with_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "REMARKS", ("theirs pads", "three ways tried"), raising=False)
    page = markdown([result("bucketserve", "Fig. 5", 1.0)])
    assert page.endswith("\n## Why, and what was tried (bucketserve)\n\n- theirs pads\n- three ways tried\n")
    assert markdown([], page) == page
    assert markdown([result("bucketserve", "Fig. 5", 1.0)], page) == page
