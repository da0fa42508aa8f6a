"""The page of reproduced figures and its numbers: new results replace theirs and leave the others; words follow."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cohort.common.errors import ConfigError
from cohort.services.simulator.figures.figure import (
    Claim,
    Figure,
    Kind,
    Reason,
    Standing,
    shipped_claims,
    shipped_reasons,
)
from cohort.services.simulator.reproduce.page_numbers import PageNumbers
from cohort.services.simulator.reproduce.reproduce import Reproduced, all_figures, ratio_of, shown_paper, shown_spread
from cohort.services.simulator.reproduce.reproduction_page import markdown, reason_of, rows_of
from cohort.services.simulator.reproduce.verdicts import REPRODUCED, Spread

PAGE = Path(__file__).parents[4] / "docs" / "reproduction.md"


def figure(system: str, name: str, paper: float = 2.0) -> Figure:
    return Figure(f"{system}-{name}", system, name, "w", "b", "m", "x", paper, lambda lab: 0.0, "n")


def result(system: str, name: str, *values: float, paper: float = 2.0, chance: bool = True) -> Reproduced:
    return Reproduced.of(figure(system, name, paper), values, range(len(values)) if chance else [])


FIGURES = [figure("baselines", "Table 1"), figure("bucketserve", "Fig. 5"), figure("ecoserve", "Fig. 1")]
CLAIM = Claim("P", "gains", Kind.OVER, ("ecoserve-Fig. 1",), "because")
NONE = PageNumbers()


def kept(*results: Reproduced, before: PageNumbers = NONE) -> PageNumbers:
    return before.with_results(results, FIGURES)


def page_of(results: Sequence[Reproduced], figures: Sequence[Figure], claim: Claim = CLAIM, *reasons: Reason) -> str:
    return markdown(NONE.with_results(results, figures), figures, [claim], reasons)


def test_one_system_anew_leaves_the_others() -> None:
    first = kept(result("baselines", "Table 1", 2.0), result("ecoserve", "Fig. 1", 1.0))
    second = kept(result("ecoserve", "Fig. 1", 3.0), before=first)
    assert second == kept(result("baselines", "Table 1", 2.0), result("ecoserve", "Fig. 1", 3.0))
    two = kept(result("ecoserve", "Fig. 1", 1.0, 1.2), before=second)
    assert two.spreads() == {"baselines-Table 1": Spread(2.0, 2.0, 2.0, 1), "ecoserve-Fig. 1": Spread(1.0, 1.1, 1.2, 2)}
    third = kept(result("bucketserve", "Fig. 5", 1.0), before=second)
    assert [row.figure.system for row in rows_of(third, FIGURES, [])] == ["baselines", "bucketserve", "ecoserve"]


def test_numbers_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "page.json"
    exact = 0.99749  # 0.997 of itself, 0.998 of the 0.9975 that is written
    certain, single = result("bucketserve", "Fig. 5", 1.5, chance=False), result("ecoserve", "Fig. 1", exact)
    numbers = kept(result("baselines", "Table 1", 2.0, 2.2, 1.9), certain, single)
    file.write_bytes(numbers.encoded())
    assert PageNumbers.read(file) == numbers
    drawn, whole = Spread(1.9, 2.0, 2.2, 3), Spread(1.5, 1.5, 1.5, 0)
    assert [*numbers.spreads().values()] == [drawn, whole, Spread(0.9975, 0.9975, 0.9975, 1)]
    assert '"Table 1 (baselines)": {"baselines-Table 1":[1.9,2.0,2.2,3]},' in file.read_text().splitlines()
    page = markdown(numbers, FIGURES, [CLAIM], [])
    assert "| gains | 2 x | 0.998 x (one seed) | not | because |" in page
    assert "1 of 3 rows were measured with one seed" in page
    rows = numbers.results(FIGURES)
    assert [(row.ours, row.verdict, len(row.seeds)) for row in rows] == [
        (2.0, "reproduced", 3),
        (1.5, "reproduced", 0),
        (0.9975, "not", 1),
    ]
    assert [shown_spread(row.spread) for row in rows] == ["1.9 to 2.2, 3 seeds", "no chance in it", "one seed"]
    file.write_bytes(kept(result("ecoserve", "Fig. 1", 1.0, math.inf)).encoded())
    (row,) = PageNumbers.read(file).results(FIGURES)
    assert "[null,null,null,2]" in file.read_text() and math.isnan(row.ours) and row.verdict == "cannot be told"
    assert PageNumbers.read(tmp_path / "none.json") == NONE
    file.write_text("{}}")
    with pytest.raises(ConfigError, match=r"page\.json: not written by"):
        PageNumbers.read(file)


def test_claims_stand_first_with_spread_and_verdict() -> None:
    lines = page_of([result("ecoserve", "Fig. 1", 1.3, 1.4, 1.2)], FIGURES).splitlines()
    at = lines.index("### P")
    assert "| gains | 2 x | 1.3 x (1.2 to 1.4) | direction | because |" in lines[at : at + 6]
    assert at < lines.index("## Rows and reasons")
    assert "because" not in page_of([result("ecoserve", "Fig. 1", 1.9)], FIGURES)
    assert "Of 1 claims: 0 reproduced, 1 direction, 0 not, 0 cannot be told." in lines
    assert not [line for line in lines if "one seed:" in line]


def test_a_paper_says_in_one_line_what_is_reproduced_and_why_most_of_the_rest_is_not() -> None:
    named = ("bucketserve-1", "bucketserve-2", "bucketserve-3", "bucketserve-4", "ecoserve-1")
    figures = [figure(*name.split("-")) for name in named]
    results = [result(*name.split("-"), value) for name, value in zip(named, (2.0, 1.3, 1.0, 1.0, 1.0), strict=True)]
    claim, first = (Claim("BucketServe", "gains", Kind.OVER, named[:count]) for count in (2, 1))
    reasons = [Reason(named[1:2], "Seldom so", "cmd"), Reason(named[2:4], "Mostly so", "cmd")]
    lines = page_of(results, figures, claim, *reasons).splitlines()
    said = lines[lines.index("### BucketServe") + 2]
    assert said == "1 of 4 rows reproduced (25 %); of the other 3, most (2) have one reason: mostly so."
    assert "\n1 of 1 rows reproduced (100 %).\n" in page_of(results[:1], figures, first, *reasons)


def test_bounds_directions_and_ranges_are_written() -> None:
    bound = replace(figure("ecoserve", "at most"), kind=Kind.AT_MOST)
    wins = replace(figure("ecoserve", "wins", 1.0), kind=Kind.MORE)
    between = replace(figure("ecoserve", "between"), paper_to=4.0)
    none = replace(figure("ecoserve", "none", math.nan), standing=Standing.UNCOMPARED)
    shown = [(shown_paper(each), f"{ratio_of(each, 5.0):.2f}") for each in (bound, wins, between, none)]
    assert shown == [("at most 2", "2.50"), ("above 1", "nan"), ("2 to 4", "1.25"), ("–", "nan")]
    verdicts = [Reproduced.of(each, [5.0], [0]).verdict for each in (bound, wins, between)]
    assert verdicts == ["not", "reproduced", "reproduced"]


def test_a_claim_without_all_of_its_rows_is_left_out() -> None:
    claim = Claim("P", "says", Kind.OVER, ("ecoserve-Fig. 1", "bucketserve-Fig. 5"))
    assert "### P" not in page_of([result("ecoserve", "Fig. 1", 1.3)], FIGURES, claim)


def test_conditions_stay_with_the_rows_they_belong_to() -> None:
    before = PageNumbers(
        {"ecoserve": ["Lengths: some."]}, {"Fig. 1 (ecoserve)": {"ecoserve-Fig. 1": (1.0, 1.0, 1.0, 1)}}
    )
    after = kept(result("baselines", "Table 1", 1.3), before=before)
    assert after.conditions["ecoserve"] == ["Lengths: some."]
    assert kept(result("ecoserve", "Fig. 1", 1.3), before=before).conditions == {"ecoserve": []}


def test_the_page_on_disk_is_current_and_every_figure_has_a_number() -> None:
    text = PAGE.read_text(encoding="utf-8")
    numbers, figures = PageNumbers.read(PAGE.with_suffix(".json")), all_figures()
    assert markdown(numbers, figures, shipped_claims(), shipped_reasons()) == text
    assert numbers.with_results([], figures).encoded() == PAGE.with_suffix(".json").read_bytes()
    found = rows_of(numbers, figures, shipped_claims())
    rows = {row.figure.id for row in found}
    _, _, lacking = text.partition("\n## Not measured yet\n")
    named = set(re.findall(r"[a-z0-9.-]+", lacking.partition("\n## ")[0]))
    assert {figure.id for figure in figures} - rows <= named
    assert len({figure.id for figure in figures}) == len(figures)
    for claim in shipped_claims():
        if set(claim.ids) <= rows:
            assert f"| {claim.statement} |" in text and f"### {claim.paper}\n" in text
    summary = text.partition("\n## Summary\n")[2].partition("\n## ")[0]
    unlike = [line for line in summary.splitlines() if re.search(r"\| (not|direction|cannot be told) \|", line)]
    assert unlike and [line for line in unlike if not line.endswith("` |")] == []
    judged = [
        row.figure.id for row in found if row.figure.standing is not Standing.UNCOMPARED and row.verdict != REPRODUCED
    ]
    assert judged and [name for name in judged if reason_of(name, shipped_reasons()) is None] == []


def test_a_figure_without_a_row_is_named() -> None:
    new = Figure("new", "s", "Fig. 1", "w", "new", "m", "x", 2.0, lambda lab: 0.0)
    assert "- s, 1: new" in page_of([], [new])
    assert "Not measured yet" not in page_of([Reproduced.of(new, [1.9], [0])], [new])


def test_rows_of_figures_that_are_no_more_leave_the_page() -> None:
    now, former = (Figure(name, "s", "Fig. 1", "w", name, "m", "x", 2.0, lambda lab: 0.0) for name in ("now", "former"))
    before = NONE.with_results([Reproduced.of(figure, [1.9], [0]) for figure in (now, former)], [now, former])
    assert [row.figure.id for row in rows_of(before, [now, former], [])] == ["now", "former"]
    assert [row.figure.id for row in rows_of(before, [now], [])] == ["now"]
    assert [*before.with_results([], [now]).spreads()] == ["now"]
