"""The table at the head of docs/reproduction.md: verdicts follow from rows, reasons are short, the page is current."""

from __future__ import annotations

from pathlib import Path

import pytest

from cohort.services.simulator.figures.claims import CLAIMS, Claim, Kind
from cohort.services.simulator.figures.figure import Figure
from cohort.services.simulator.reproduce import Reproduced, all_figures, markdown
from cohort.services.simulator.verdicts import rows_of, summary, verdict

PAGE = Path(__file__).parents[3] / "docs" / "reproduction.md"


@pytest.mark.parametrize(
    ("kind", "paper", "ours", "said"),
    [
        (Kind.OVER, 2.0, 1.6, "reproduced"),
        (Kind.OVER, 2.0, 2.5, "reproduced"),
        (Kind.OVER, 2.0, 1.49, "direction"),
        (Kind.OVER, 2.0, 9.0, "direction"),
        (Kind.OVER, 2.0, 1.04, "not"),
        (Kind.OVER, 1.2, 1.0, "not"),  # within 25 %, but no gain
        (Kind.OVER, 0.5, 0.9, "direction"),  # a time that shrinks
        (Kind.OVER, 0.5, 1.1, "not"),
        (Kind.CHANGE, -70.0, -60.0, "reproduced"),
        (Kind.CHANGE, -70.0, -20.0, "direction"),
        (Kind.CHANGE, -70.0, 3.0, "not"),
        (Kind.CHANGE, 14.7, -4.9, "not"),
        (Kind.VALUE, 100.0, 76.0, "reproduced"),
        (Kind.VALUE, 100.0, 126.0, "not"),
        (Kind.AT_MOST, 5.0, 0.1, "reproduced"),
        (Kind.AT_MOST, 5.0, 7.0, "not"),
        (Kind.AT_LEAST, -10.0, 30.0, "reproduced"),
        (Kind.AT_LEAST, -10.0, -12.0, "reproduced"),
        (Kind.AT_LEAST, -10.0, -13.0, "not"),
        (Kind.UNTOLD, 1.0, 1.0, "cannot be told"),
    ],
)
def test_one_row(kind: Kind, paper: float, ours: float, said: str) -> None:
    assert verdict(kind, [(paper, ours)]) == said


def test_the_worst_row_decides() -> None:
    assert verdict(Kind.OVER, [(2.0, 2.0), (2.0, 1.3)]) == "direction"
    assert verdict(Kind.OVER, [(2.0, 2.0), (2.0, 1.3), (2.0, 1.0)]) == "not"


def _figure(name: str, note: str, paper: float) -> Figure:
    return Figure(name, "s", "Fig. 1", "w", "b", "m", "x", paper, lambda lab: 0.0, note)


def _row(note: str, paper: float, ours: float) -> str:
    return f"| w | b | m, x | {paper:g} | {ours:g} | 0.00 | {note} |"


def test_rows_are_found_by_their_figures() -> None:
    figures = [_figure("a", "", 2.0), _figure("b", "other", 3.0)]
    lines = ["", "## Fig. 1 (s)", "", _row("", 2.0, 1.9), _row("other", 3.0, 1.2)]
    table = summary(lines, figures, [Claim("P", "says", Kind.OVER, ("a", "b"), "because")])
    assert table[-1] == "| P | says | 2 to 3 x | 1.2 to 1.9 x | direction | because |"
    assert "Of 1 claims: 0 reproduced, 1 direction, 0 not, 0 cannot be told." in table


def test_a_claim_without_all_of_its_rows_is_left_out() -> None:
    figures = [_figure("a", "", 2.0), _figure("b", "other", 3.0)]
    lines = ["## Fig. 1 (s)", _row("", 2.0, 1.9)]
    assert summary(lines, figures, [Claim("P", "says", Kind.OVER, ("a", "b"))]) == []


def test_claims_name_figures_that_exist_and_give_short_reasons() -> None:
    known = {figure.id for figure in all_figures()}
    assert [name for claim in CLAIMS for name in claim.ids if name not in known] == []
    assert [claim.why for claim in CLAIMS if len(claim.why.split()) > 8] == []


def test_the_page_has_a_row_for_every_figure_and_the_summary_that_follows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert markdown([], page) == page
    assert len(rows_of(page.splitlines())) >= len(all_figures())
    for claim in CLAIMS:
        assert f"| {claim.paper} | {claim.says} |" in page


def test_a_new_result_changes_the_verdict() -> None:
    figure = next(figure for figure in all_figures() if figure.id == "bucketserve-5b-utilisation")

    def page(ours: float) -> str:
        return markdown([Reproduced.of(figure, ours)])

    assert "| BucketServe | GPU utilisation (Fig. 5b) | 81.7 % | 80 % | reproduced |" in page(80.0)
    assert "| BucketServe | GPU utilisation (Fig. 5b) | 81.7 % | 40 % | not |" in page(40.0)
