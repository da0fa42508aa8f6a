"""Verdicts follow from rows and their spread; claims name figures that exist and give short reasons."""

from __future__ import annotations

import argparse
import math
import re
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
from cohort.services.simulator.reproduce.judged_rows import Rules
from cohort.services.simulator.reproduce.reproduce import all_figures
from cohort.services.simulator.reproduce.verdicts import Spread, kind_of, row_verdict, worst


def of(*values: float) -> Spread:
    return Spread.of(values)


@pytest.mark.parametrize(
    ("kind", "paper", "ours", "said"),
    [
        (Kind.OVER, 2.0, 1.42, "reproduced"),  # half of the gain, as a logarithm: the root
        (Kind.OVER, 2.0, 4.0, "reproduced"),  # double of it: the square
        (Kind.OVER, 2.0, 1.41, "direction"),
        (Kind.OVER, 2.0, 4.1, "direction"),
        (Kind.OVER, 1.35, 1.156, "direction"),  # within 15 % of the factor, and less than half of the gain
        (Kind.OVER, 2.0, 1.04, "not"),
        (Kind.OVER, 1.08, 1.045, "not"),  # more than half of the gain, but hardly a gain
        (Kind.OVER, 0.25, 0.5, "reproduced"),  # a time that shrinks
        (Kind.OVER, 0.25, 0.51, "direction"),
        (Kind.OVER, 0.5, 1.1, "not"),
        (Kind.CHANGE, -75.0, -50.0, "reproduced"),  # a quarter is left, and a half
        (Kind.CHANGE, -75.0, -49.0, "direction"),
        (Kind.CHANGE, -25.8, -69.9, "direction"),
        (Kind.CHANGE, -70.0, 3.0, "not"),
        (Kind.CHANGE, -14.7, -4.9, "not"),
        (Kind.CHANGE, -14.7, -100.0, "direction"),
        (Kind.VALUE, 100.0, 76.0, "reproduced"),
        (Kind.VALUE, 100.0, 126.0, "not"),
        (Kind.AT_MOST, 5.0, 5.0, "reproduced"),
        (Kind.AT_MOST, 30.0, 31.6, "not"),
        (Kind.AT_LEAST, -10.0, -10.0, "reproduced"),
        (Kind.AT_LEAST, -10.0, -10.1, "not"),
        (Kind.MORE, 1.0, 1.05, "wins"),
        (Kind.MORE, 1.0, 1.04, "not"),
        (Kind.LESS, 0.0, -6.0, "wins"),
        (Kind.LESS, 0.0, -4.0, "not"),
        (Kind.NOT_COMPARABLE, 1.0, 1.0, "unclear"),
    ],
)
def test_one_row(kind: Kind, paper: float, ours: float, said: str) -> None:
    assert row_verdict(kind, paper, of(ours)) == said


@pytest.mark.parametrize(
    ("kind", "paper", "values", "said"),
    [
        (Kind.OVER, 2.0, (1.3, 1.7, 1.9), "reproduced"),  # the median says how large a gain is
        (Kind.OVER, 2.0, (1.2, 1.3, 1.9), "direction"),
        (Kind.OVER, 2.0, (0.98, 1.6, 1.9), "unclear"),  # a gain that one seed does not have
        (Kind.OVER, 2.0, (0.9, 1.0, 1.3), "unclear"),
        (Kind.OVER, 2.0, (0.9, 1.0, 1.04), "not"),
        (Kind.CHANGE, -70.0, (-60.0, -20.0, 2.0), "unclear"),
        (Kind.VALUE, 100.0, (80.0, 100.0, 124.0), "reproduced"),
        (Kind.VALUE, 100.0, (70.0, 100.0, 124.0), "unclear"),
        (Kind.AT_MOST, 5.0, (1.0, 2.0, 9.0), "unclear"),
        (Kind.MORE, 1.0, (1.0, 1.2, 1.3), "unclear"),
        (Kind.OVER, 2.0, (1.5, math.inf), "unclear"),
    ],
)
def test_several_seeds(kind: Kind, paper: float, values: tuple[float, ...], said: str) -> None:
    assert row_verdict(kind, paper, of(*values)) == said


@pytest.mark.parametrize(
    ("kind", "printed", "ours", "said"),
    [
        (Kind.OVER, (1.28, 4.0), 1.28, "reproduced"),  # a wide range has no slack
        (Kind.OVER, (1.28, 4.0), 1.25, "direction"),
        (Kind.OVER, (1.28, 4.0), 4.1, "direction"),
        (Kind.OVER, (1.9, 2.1), 1.46, "reproduced"),  # a narrow one has that of both ends
        (Kind.OVER, (1.9, 2.1), 1.44, "direction"),
        (Kind.OVER, (1.9, 2.1), 1.04, "not"),
        (Kind.OVER, (0.9, 0.4), 0.39, "direction"),
        (Kind.OVER, (0.9, 0.4), 0.5, "reproduced"),
        (Kind.OVER, (0.9, 0.4), 0.96, "not"),
        (Kind.VALUE, (63.0, 79.0), 60.0, "reproduced"),
        (Kind.VALUE, (63.0, 79.0), 59.0, "not"),
        (Kind.VALUE, (20.0, 80.0), 19.0, "not"),
    ],
)
def test_a_range_holds_inside_or_near_both_of_its_ends(
    kind: Kind, printed: tuple[float, float], ours: float, said: str
) -> None:
    assert row_verdict(kind, printed[0], of(ours), printed[1]) == said


def test_a_number_of_a_mechanism_that_hardly_any_request_used_says_nothing() -> None:
    used = [row_verdict(Kind.VALUE, 99.0, Spread.of([99.0], exercised=[share])) for share in (0.0, 0.9, 1.0, 50.0)]
    assert used == ["unexercised", "unexercised", "reproduced", "reproduced"]
    assert row_verdict(Kind.VALUE, 99.0, Spread.of([math.nan], exercised=[0.0])) == "unclear"


def test_the_worst_row_decides() -> None:
    assert worst(["reproduced", "direction"]) == "direction"
    assert worst(["reproduced", "unclear"]) == "unclear"
    assert worst(["reproduced", "unclear", "not"]) == "not"
    assert worst(["reproduced", "unexercised", "direction"]) == "unexercised"


def _figure(name: str, paper: float, unit: str = "x", metric: str = "m") -> Figure:
    return Figure(name, "s", "Fig. 1", "w", "b", metric, unit, paper, lambda lab: 0.0)


def test_rows_are_compared_as_their_claim_or_unit_says() -> None:
    claim = Claim("P", "says", Kind.AT_MOST, ("a",))
    assert kind_of(_figure("a", 2.0), [claim]) is Kind.AT_MOST
    assert kind_of(_figure("b", 2.0), [claim]) is Kind.OVER
    assert kind_of(_figure("b", 1.0), [claim]) is Kind.NOT_COMPARABLE
    assert kind_of(_figure("b", -50.0, "%", "latency, change"), [claim]) is Kind.CHANGE
    assert kind_of(_figure("b", 50.0, "%", "utilisation"), [claim]) is Kind.VALUE


def test_claims_name_figures_that_exist_and_one_claim_of_who_wins_has_one_group_of_models() -> None:
    known, claims = {figure.id for figure in all_figures()}, shipped_claims()
    assert claims and [name for claim in claims for name in claim.ids if name not in known] == []
    standing = {figure.id: figure.standing for figure in all_figures()}
    assert {standing[name] for claim in claims for name in claim.ids} == {Standing.CLAIM}
    wins = {figure.id for figure in all_figures() if kind_of(figure) in (Kind.MORE, Kind.LESS)}
    named = [name for claim in claims for name in claim.ids if claim.kind in (Kind.MORE, Kind.LESS)]
    assert len(named) == len(set(named)) and set(named) <= wins
    assert {name for name in wins if standing[name] is Standing.CLAIM} == set(named)
    models = re.compile(r"opt-30b|llama-3-70b|opt-13b|32b|72b")
    assert [
        claim.statement for claim in claims if len({m for name in claim.ids for m in models.findall(name)}) > 1
    ] == ["decision over iteration (14)"]


def test_what_has_no_number_beside_it_has_no_verdict_whatever_its_claim() -> None:
    beside = replace(_figure("a", 5.0, "%"), standing=Standing.UNCOMPARED)
    assert kind_of(beside, [Claim("P", "says", Kind.AT_MOST, ("a",))]) is Kind.NOT_COMPARABLE
    assert kind_of(replace(_figure("b", 5.0, "%"), kind=Kind.AT_MOST)) is Kind.AT_MOST


def test_wall_time_is_compared_as_a_bound_or_not_at_all() -> None:
    named = ("overhead", "deciding", "scheduling")
    of_machine = [figure for figure in all_figures() if any(word in figure.id for word in named)]
    assert len(of_machine) >= 5
    assert {kind_of(figure) for figure in of_machine} <= {Kind.AT_MOST, Kind.VALUE, Kind.NOT_COMPARABLE}


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
    assert Rules().reason_of("dynaserve-table1-code-disaggregated-p99-tbt") is reasons[0]
    orca, vllm = (Rules().reason_of(f"ecoserve-10-rate-alpaca-{other}") for other in ("orca", "vllm"))
    assert orca is not None and vllm is not None and orca is not vllm


def test_the_commands_that_show_why_have_the_options_they_name() -> None:
    parser = argparse.ArgumentParser()
    add_reproduce_arguments(parser)
    for each in shipped_reasons():
        if each.shown_by.startswith("cohort reproduce "):
            assert parser.parse_args(each.shown_by.split()[2:]).figure


def test_names_are_expanded_as_a_shell_does() -> None:
    assert expanded("a-{b,c}-d e{,-f}") == ("a-b-d", "a-c-d", "e", "e-f")
    assert expanded("{a,b}-{c,d}") == ("a-c", "a-d", "b-c", "b-d") and expanded("") == ()
