"""Verdicts follow from rows and their spread; claims name figures that exist and give short reasons."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import pytest

from cohort.services.simulator.figures.figure import (
    Claim,
    Figure,
    Kind,
    Standing,
    expanded,
    shipped_claims,
    shipped_reasons,
)
from cohort.services.simulator.options import add_reproduce_arguments
from cohort.services.simulator.reproduce.reproduce import Reproduced, all_figures
from cohort.services.simulator.reproduce.reproduction_page import reason_of
from cohort.services.simulator.reproduce.verdicts import Spread, kind_of, row_verdict, worst
from tests.services.simulator.reproduce.test_reproduction_page import page_of


def of(*values: float) -> Spread:
    return Spread.of(values)


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
        (Kind.MORE, 1.0, 1.05, "reproduced"),
        (Kind.MORE, 1.0, 1.04, "not"),
        (Kind.LESS, 0.0, -6.0, "reproduced"),
        (Kind.LESS, 0.0, -4.0, "not"),
        (Kind.NOT_COMPARABLE, 1.0, 1.0, "cannot be told"),
    ],
)
def test_one_row(kind: Kind, paper: float, ours: float, said: str) -> None:
    assert row_verdict(kind, paper, of(ours)) == said


@pytest.mark.parametrize(
    ("kind", "paper", "values", "said"),
    [
        (Kind.OVER, 2.0, (1.6, 1.7, 1.9), "reproduced"),
        (Kind.OVER, 2.0, (1.4, 1.7, 1.9), "reproduced"),  # the median says how large a gain is
        (Kind.OVER, 2.0, (1.2, 1.3, 1.9), "direction"),
        (Kind.OVER, 2.0, (0.98, 1.6, 1.9), "cannot be told"),  # a gain that one seed does not have
        (Kind.OVER, 2.0, (0.9, 1.0, 1.3), "cannot be told"),
        (Kind.OVER, 2.0, (0.9, 1.0, 1.04), "not"),
        (Kind.CHANGE, -70.0, (-60.0, -20.0, 2.0), "cannot be told"),
        (Kind.VALUE, 100.0, (80.0, 100.0, 124.0), "reproduced"),
        (Kind.VALUE, 100.0, (70.0, 100.0, 124.0), "cannot be told"),
        (Kind.AT_MOST, 5.0, (1.0, 2.0, 9.0), "cannot be told"),
        (Kind.OVER, 2.0, (1.5, math.inf), "cannot be told"),
    ],
)
def test_several_seeds(kind: Kind, paper: float, values: tuple[float, ...], said: str) -> None:
    assert row_verdict(kind, paper, of(*values)) == said


@pytest.mark.parametrize(
    ("kind", "printed", "ours", "said"),
    [
        (Kind.OVER, (1.2, 2.0), 1.6, "reproduced"),
        (Kind.OVER, (1.2, 2.0), 2.5, "reproduced"),
        (Kind.OVER, (1.2, 2.0), 2.6, "direction"),
        (Kind.OVER, (1.2, 2.0), 1.04, "not"),
        (Kind.OVER, (0.9, 0.4), 0.31, "reproduced"),
        (Kind.OVER, (0.9, 0.4), 0.96, "not"),
        (Kind.VALUE, (60.0, 80.0), 46.0, "reproduced"),
        (Kind.VALUE, (60.0, 80.0), 44.0, "not"),
    ],
)
def test_a_range_holds_within_a_quarter_of_its_ends(
    kind: Kind, printed: tuple[float, float], ours: float, said: str
) -> None:
    assert row_verdict(kind, printed[0], of(ours), printed[1]) == said


def test_the_worst_row_decides() -> None:
    assert worst(["reproduced", "direction"]) == "direction"
    assert worst(["reproduced", "cannot be told"]) == "cannot be told"
    assert worst(["reproduced", "cannot be told", "not"]) == "not"


def _figure(name: str, paper: float, unit: str = "x", metric: str = "m") -> Figure:
    return Figure(name, "s", "Fig. 1", "w", "b", metric, unit, paper, lambda lab: 0.0)


def test_rows_are_compared_as_their_claim_or_unit_says() -> None:
    claim = Claim("P", "says", Kind.AT_MOST, ("a",))
    assert kind_of(_figure("a", 2.0), [claim]) is Kind.AT_MOST
    assert kind_of(_figure("b", 2.0), [claim]) is Kind.OVER
    assert kind_of(_figure("b", 1.0), [claim]) is Kind.NOT_COMPARABLE
    assert kind_of(_figure("b", -50.0, "%", "latency, change"), [claim]) is Kind.CHANGE
    assert kind_of(_figure("b", 50.0, "%", "utilisation"), [claim]) is Kind.VALUE


def test_claims_name_figures_that_exist_and_give_short_reasons() -> None:
    known, claims = {figure.id for figure in all_figures()}, shipped_claims()
    assert claims and [name for claim in claims for name in claim.ids if name not in known] == []
    standing = {figure.id: figure.standing for figure in all_figures()}
    assert [name for claim in claims for name in claim.ids if standing[name] is Standing.ANCHOR] == []
    assert [claim.why for claim in claims if len(claim.why.split()) > 8] == []
    run = "cohort reproduce --figure "
    shown = [claim.shown_by.removeprefix(run).split()[0] for claim in claims if claim.shown_by.startswith(run)]
    assert [prefix for prefix in shown if not any(name.startswith(prefix) for name in known)] == []
    others = {claim.shown_by for claim in claims if claim.shown_by and not claim.shown_by.startswith(run)}
    assert others == {f"cohort bench decisions {which}" for which in ("prefill-order", "iteration", "placement")}


def test_a_new_result_changes_the_verdict() -> None:
    figure = next(figure for figure in all_figures() if figure.id == "bucketserve-5b-utilisation")
    claim = next(claim for claim in shipped_claims() if claim.ids == (figure.id,))

    def page(*values: float) -> str:
        return page_of([Reproduced.of(figure, values, range(len(values)))], all_figures(), claim)

    assert "| GPU utilisation (Fig. 5b) | 81.7 % | 80 % (79 to 82) | reproduced |" in page(80.0, 79.0, 82.0)
    assert "| GPU utilisation (Fig. 5b) | 81.7 % | 40 % (one seed) | not |" in page(40.0)
    assert "| GPU utilisation (Fig. 5b) | 81.7 % | 80 % (40 to 82) | cannot be told |" in page(80.0, 40.0, 82.0)


def test_what_has_no_number_beside_it_has_no_verdict_whatever_its_claim() -> None:
    beside = replace(_figure("a", 5.0, "%"), standing=Standing.UNCOMPARED)
    assert kind_of(beside, [Claim("P", "says", Kind.AT_MOST, ("a",))]) is Kind.NOT_COMPARABLE
    assert kind_of(replace(_figure("b", 5.0, "%"), kind=Kind.AT_MOST)) is Kind.AT_MOST


def test_wall_time_is_compared_as_a_bound_or_not_at_all() -> None:
    named = ("overhead", "deciding", "scheduling")
    of_machine = [figure for figure in all_figures() if any(word in figure.id for word in named)]
    assert len(of_machine) >= 5
    assert {kind_of(figure) for figure in of_machine} <= {Kind.AT_MOST, Kind.VALUE}


def test_reasons_fit_rows_and_name_commands_that_there_are() -> None:
    known = {figure.id for figure in all_figures()}
    reasons = shipped_reasons()
    begins = [begin for reason in reasons for begin in reason.begins]
    assert [begin for begin in begins if not any(name.startswith(begin) for name in known)] == []
    run = "cohort reproduce --figure "
    shown = [reason.shown_by.removeprefix(run).split()[0] for reason in reasons if reason.shown_by.startswith(run)]
    assert [prefix for prefix in shown if not any(name.startswith(prefix) for name in known)] == []
    others = {reason.shown_by for reason in reasons if not reason.shown_by.startswith(run)}
    assert others == {f"cohort bench decisions {which}" for which in ("prefill-order", "iteration", "placement")}
    assert reason_of("dynaserve-table1-code-disaggregated-p99-tbt", reasons) is reasons[0]
    orca, vllm = (reason_of(f"ecoserve-10-rate-alpaca-{other}", reasons) for other in ("orca", "vllm"))
    assert orca is not None and vllm is not None and orca is not vllm


def test_the_commands_that_show_why_have_the_options_they_name() -> None:
    parser = argparse.ArgumentParser()
    add_reproduce_arguments(parser)
    for each in (*shipped_claims(), *shipped_reasons()):
        if each.shown_by.startswith("cohort reproduce "):
            assert parser.parse_args(each.shown_by.split()[2:]).figure


def test_names_are_expanded_as_a_shell_does() -> None:
    assert expanded("a-{b,c}-d e{,-f}") == ("a-b-d", "a-c-d", "e", "e-f")
    assert expanded("{a,b}-{c,d}") == ("a-c", "a-d", "b-c", "b-d") and expanded("") == ()


def test_the_reason_and_what_shows_it_stand_where_a_claim_is_not_reproduced() -> None:
    ratio = _figure("ratio", 2.0)
    claim = Claim("P", "says", Kind.OVER, ("ratio",), "because", "cohort reproduce --figure case")
    assert "| reproduced |  |" in page_of([Reproduced.of(ratio, [1.9], [0])], [ratio], claim)
    page = page_of([Reproduced.of(ratio, [0.9], [0])], [ratio], claim)
    assert "| not | because; `case` |" in page


def test_rows_are_counted_with_those_that_cannot_be_told_and_without() -> None:
    figures = [replace(_figure(name, 2.0), workload=name) for name in "abcd"]
    values = [(2.0, 2.1), (4.0, 4.1), (0.9, 0.9), (0.9, 2.0)]
    rows = [Reproduced.of(figure, found, [0, 1]) for figure, found in zip(figures, values, strict=True)]
    page = page_of(rows, figures, Claim("P", "says", Kind.OVER, ("a",)))
    assert "a paper prints: 1 reproduced, 1 direction, 1 not, 1 cannot be told." in page
    assert "Reproduced are 25 % of these rows, 33 % of those that" in page
    assert "with the ones that agree in direction 50 % and 67 %." in page


def test_readings_and_what_compares_nothing_are_counted_apart() -> None:
    standings = (Standing.CLAIM, Standing.READING, Standing.ANCHOR, Standing.UNCOMPARED)
    figures = [replace(_figure(standing.name, 2.0), standing=standing) for standing in standings]
    rows = [Reproduced.of(figure, [2.0], [0]) for figure in figures]
    page = page_of(rows, figures, Claim("P", "s", Kind.OVER, ("CLAIM",)))
    assert "Of 1 rows, each a number, bound or direction that a paper prints: 1 reproduced" in page
    assert "Of 1 other readings of the same numbers: 1 reproduced" in page and "1 more rows compare nothing." in page
    assert "Of 1 rows that chose a parameter: 1 reproduced" in page
