"""The page of reproduced figures and all rows beside it: new results replace theirs and leave the others."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cohort.common.errors import ConfigError
from cohort.services.simulator.figures.figure import Claim, Constant, Figure, Kind, Reason, Standing, shipped_unmapped
from cohort.services.simulator.reproduce.judged_rows import PageNumbers, Rules
from cohort.services.simulator.reproduce.reproduce import Reproduced, all_figures, ratio_of, shown_paper, shown_spread
from cohort.services.simulator.reproduce.reproduction_page import markdown
from cohort.services.simulator.reproduce.verdicts import REPRODUCED, WON, Spread

PAGE = Path(__file__).parents[4] / "docs" / "reproduction.md"


def figure(name: str, paper: float = 2.0) -> Figure:
    return Figure(name, name.split("-")[0], name, "w", "b", "m", "x", paper, lambda lab: 0.0, "n")


def result(name: str, *values: float, chance: bool = True) -> Reproduced:
    return Reproduced.of(figure(name), values, range(len(values)) if chance else [])


FIGURES = [figure("a-1"), figure("a-2"), figure("b-1")]
CHOSEN = Constant("_K", "folder/file.py", "3", "load", "Fig. 9", "", "b-")
RULES = Rules(
    [Claim("A", "gains", Kind.OVER, ("a-1",)), Claim("B", "gains, too", Kind.OVER, ("b-1",))],
    [Reason(("a-",), "for this", "cohort reproduce --figure a"), Reason(("a-2",), "for that", "cmd")],
    [CHOSEN],
    ["a-1", "a-2", "b-1"],
)
NONE = PageNumbers()


def kept(*results: Reproduced, before: PageNumbers = NONE, figures: Sequence[Figure] = FIGURES) -> PageNumbers:
    return before.with_results(results, figures, RULES)


def page_of(*results: Reproduced, rules: Rules = RULES, figures: Sequence[Figure] = FIGURES) -> str:
    numbers = NONE.with_results(results, figures, rules)
    return markdown(numbers.judged(figures, rules), figures, rules, {"A": "Fig. 7."})


def test_one_row_anew_leaves_the_others_and_rows_of_no_figure_go() -> None:
    first = kept(result("a-1", 2.0), result("b-1", 1.0))
    second = kept(result("b-1", 3.0, 3.2), before=first)
    assert second.spreads() == {"a-1": Spread(2.0, 2.0, 2.0, 1), "b-1": Spread(3.0, 3.1, 3.2, 2)}
    third = kept(result("a-2", 1.0), before=second)
    assert [row.figure.id for row in third.judged(FIGURES, RULES)] == ["a-1", "a-2", "b-1"]
    assert [*third.with_results([], FIGURES[:1], RULES).spreads()] == ["a-1"]


def test_rows_are_read_as_they_were_written_and_judged_anew(tmp_path: Path) -> None:
    file = tmp_path / "page.json"
    numbers = kept(result("a-1", 2.0, 2.2, 1.9), result("a-2", 1.5, chance=False), result("b-1", 0.99749))
    file.write_bytes(numbers.encoded())
    assert PageNumbers.read(file) == numbers
    single = Spread(0.9975, 0.9975, 0.9975, 1)
    assert [*numbers.spreads().values()] == [Spread(1.9, 2.0, 2.2, 3), Spread(1.5, 1.5, 1.5, 0), single]
    first, _, last = json.loads(file.read_text())["rows"]
    assert first == {
        **{"id": "a-1", "low": 1.9, "median": 2.0, "high": 2.2, "seeds": 3},
        **{"paper": "2", "unit": "x", "class": "counted", "verdict": "reproduced"},
    }
    assert (last["rests_on"], last["verdict"]) == (["_K"], "not")
    rows = numbers.results(FIGURES)
    assert [(row.verdict, len(row.seeds)) for row in rows] == [("reproduced", 3), ("reproduced", 0), ("not", 1)]
    assert [shown_spread(row.spread) for row in rows] == ["1.9 to 2.2, 3 seeds", "no chance in it", "one seed"]
    file.write_bytes(kept(result("b-1", 1.0, math.inf)).encoded())
    (row,) = PageNumbers.read(file).results(FIGURES)
    assert math.isnan(row.ours) and row.verdict == "unclear"
    assert PageNumbers.read(tmp_path / "none.json") == NONE
    file.write_text("{}}")
    with pytest.raises(ConfigError, match=r"page\.json: not written by"):
        PageNumbers.read(file)


def test_the_headline_counts_all_rows_that_were_laid_down_but_none_that_rests_on_a_chosen_constant() -> None:
    page = page_of(result("a-1", 1.9), result("b-1", 2.1))
    assert "**Of 3 rows that compare a printed number or range, 1 are reproduced (33 %).**" in page
    assert "\n1 more agree but rest on a constant" in page
    assert "\n|A|2|1|0|0|0|0|0|1|\n|B|1|0|1|0|0|0|0|0|\n" in page
    assert "(`--lacking` measures them): a 1." in page


def test_claims_have_theirs_ours_and_verdict() -> None:
    page = page_of(result("a-1", 1.3, 1.4, 1.2), result("a-2", 0.9), result("b-1", 1.9))
    assert "|gains|2 x|1.3 x (1.2…1.4)|direction|" in page and "|gains, too|2 x|1.9 x|reproduced*|" in page
    assert "\n1 of 2 that do not agree: for " in page
    assert "|load, `_K` in folder/file.py|3|Fig. 9|`b-`|" in page and "- **A**: Fig. 7." in page
    reasons = [
        row.reason and row.reason.why for row in kept(result("a-1", 1.0), result("a-2", 1.0)).judged(FIGURES, RULES)
    ]
    assert reasons == ["for this", "for that"]
    assert "## B\n\nNo claim has all of its rows yet.\n" in page_of(result("a-1", 1.3))


def test_who_wins_bounds_readings_and_new_rows_are_counted_apart() -> None:
    figures = [
        replace(figure("a-1"), standing=Standing.READING),
        replace(figure("a-2"), kind=Kind.AT_MOST),
        replace(figure("a-3", 1.0), kind=Kind.MORE),
        replace(figure("a-4", 1.0), kind=Kind.MORE),
        figure("b-2"),
        replace(figure("b-3"), standing=Standing.ANCHOR),
    ]
    rules = replace(RULES, claims=[Claim("A", "wins", Kind.MORE, ("a-3", "a-4"))], denominator=[])
    results = [Reproduced.of(each, [1.9], [0]) for each in figures]
    page = page_of(*results, rules=rules, figures=figures)
    assert "Bounds: 1 of 1 agree, 0 of them \\*." in page
    assert "Who wins: 1 of 1 claims hold, 0 of them \\*." in page and "|wins||1.9 x|wins|" in page
    assert "Rows added since: 1 of 1 agree, 1 of them \\*." in page and "Other readings: 1 of 1 agree" in page
    classes = [row.class_ for row in NONE.with_results(results, figures, rules).judged(figures, rules)]
    assert classes == ["reading", "bound", "win", "win", "added", "anchor"]


def test_bounds_directions_and_ranges_are_written() -> None:
    bound = replace(figure("a-1"), kind=Kind.AT_MOST)
    wins = replace(figure("a-1", 1.0), kind=Kind.MORE)
    between = replace(figure("a-1"), paper_to=4.0)
    none = replace(figure("a-1", math.nan), standing=Standing.UNCOMPARED)
    shown = [(shown_paper(each), f"{ratio_of(each, 5.0):.2f}") for each in (bound, wins, between, none)]
    assert shown == [("at most 2", "2.50"), ("above 1", "nan"), ("2 to 4", "1.25"), ("–", "nan")]
    verdicts = [Reproduced.of(each, [3.0], [0]).verdict for each in (bound, wins, between)]
    assert verdicts == ["not", "wins", "reproduced"]


def test_a_row_whose_mechanism_was_not_looked_at_is_lacking() -> None:
    split = replace(figure("a-1"), exercised=lambda lab: 0.0)
    assert kept(result("a-1", 2.0)).lacking([split], 1) == ["a-1"]
    measured = kept(Reproduced.of(split, [2.0], [0], [0.0]), figures=[split])
    assert measured.lacking([split], 1) == [] and measured.lacking([split], 2) == ["a-1"]
    assert measured.judged([split], RULES)[0].verdict == "unexercised"


def test_conditions_stay_with_the_rows_they_belong_to() -> None:
    before = PageNumbers({"ecoserve": ["Lengths: some."]})
    assert kept(result("a-1", 1.3), before=before).conditions == {"ecoserve": ["Lengths: some."], "a": []}
    assert kept(result("ecoserve-1", 1.3), before=before).conditions == {"ecoserve": []}


def test_the_page_on_disk_is_current_and_every_row_that_is_not_reproduced_has_a_reason() -> None:
    text, rules, figures = PAGE.read_text(encoding="utf-8"), Rules(), all_figures()
    numbers = PageNumbers.read(PAGE.with_suffix(".json"))
    rows = numbers.judged(figures, rules)
    assert markdown(rows, figures, rules, shipped_unmapped()) == text
    assert numbers.with_results([], figures, rules).encoded() == PAGE.with_suffix(".json").read_bytes()
    assert len({figure.id for figure in figures}) == len(figures)
    judged = [row for row in rows if row.figure.standing is not Standing.UNCOMPARED]
    unlike = [row for row in judged if row.verdict not in (REPRODUCED, WON)]
    assert unlike and [row.figure.id for row in unlike if row.reason is None] == []


def test_the_page_is_short_when_every_row_has_a_number() -> None:
    figures, rules = all_figures(), Rules()
    results = [Reproduced.of(each, [1.11, 1.23, 1.34], [0, 1, 2], [9.0] * 3) for each in figures]
    rows = NONE.with_results(results, figures, rules).judged(figures, rules)
    assert len(markdown(rows, figures, rules, shipped_unmapped()).split()) <= 1_400
