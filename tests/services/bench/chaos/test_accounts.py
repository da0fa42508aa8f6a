"""What counts as accounted for: by the ending of a request, what was due, and what was broken meanwhile."""

from __future__ import annotations

import pytest

from cohort.services.bench.chaos.accounts import Accounts, Fault, Verdict, Waits, judge
from cohort.services.bench.chaos.answer_content import AnswerContent
from cohort.services.bench.chaos.exchange import Answered, Broken, Ending, Failed, Left, Refused, Replied, Silent

KNOWN = AnswerContent(("a harbour",), ((),), ((),), ("length",))
OTHER = AnswerContent(("a night",), ((),), ((),), ("length",))
GATEWAY = Fault("gateway", "kill", 10.0, 14.0)
SECOND_GATEWAY = Fault("gateway-1", "kill", 10.0, 14.0)
STOPPED = Fault("gateway", "stop", 10.0, 14.0)
WORKER = Fault("decode-0", "kill", 10.0, 14.0)


@pytest.mark.parametrize(
    ("ending", "expected", "under", "verdict"),
    [
        (Answered(KNOWN), KNOWN, [], Verdict.RIGHT),
        (Answered(KNOWN), None, [], Verdict.RIGHT),
        (Answered(OTHER), KNOWN, [], Verdict.WRONG),
        (Answered(OTHER), KNOWN, [GATEWAY], Verdict.WRONG),
        (Answered(KNOWN), 400, [], Verdict.WRONG),
        (Replied(200, {}), 200, [], Verdict.RIGHT),
        (Replied(200, {}), 401, [], Verdict.WRONG),
        (Refused(400, "too long"), 400, [], Verdict.RIGHT),
        (Refused(400, ""), 400, [], Verdict.LOST),
        (Refused(400, "too long"), KNOWN, [WORKER], Verdict.LOST),
        (Refused(429, "too many"), KNOWN, [], Verdict.REFUSED),
        (Refused(503, "no worker"), KNOWN, [WORKER], Verdict.REFUSED),
        (Refused(503, "no worker"), KNOWN, [], Verdict.LOST),
        (Refused(500, "broken"), KNOWN, [GATEWAY], Verdict.LOST),
        (Failed("lost"), KNOWN, [WORKER], Verdict.LOST),
        (Failed("the server ends"), KNOWN, [GATEWAY], Verdict.CUT),
        (Broken("reset"), KNOWN, [GATEWAY], Verdict.CUT),
        (Broken("reset"), KNOWN, [SECOND_GATEWAY], Verdict.CUT),
        (Broken("reset"), KNOWN, [Fault("all", "restart", 10.0)], Verdict.CUT),
        (Broken("reset"), KNOWN, [Fault("decode-0+gateway", "kill", 10.0)], Verdict.CUT),
        (Broken("reset"), KNOWN, [Fault("decode-0+manager", "kill", 10.0)], Verdict.LOST),
        (Broken("reset"), KNOWN, [STOPPED], Verdict.LOST),
        (Broken("reset"), KNOWN, [WORKER], Verdict.LOST),
        (Silent(), KNOWN, [GATEWAY], Verdict.LOST),
        (Left(), KNOWN, [], Verdict.LEFT),
    ],
)
def test_the_verdict(
    ending: Ending, expected: AnswerContent | int | None, under: list[Fault], verdict: Verdict
) -> None:
    assert judge(ending, expected, under)[0] is verdict


def test_a_fault_counts_while_it_lasts_and_not_for_requests_before_or_long_after() -> None:
    accounts = Accounts()
    accounts.faults.append(Fault("gateway", "kill", 10.0))
    assert accounts.book("before", 1.0, 9.0, Broken("reset"), KNOWN) is Verdict.LOST
    assert accounts.book("amid", 1.0, 10.5, Broken("reset"), KNOWN) is Verdict.CUT
    accounts.faults[0].back_s = 14.0
    assert accounts.book("after", 30.0, 31.0, Broken("reset"), KNOWN) is Verdict.LOST
    assert (accounts.requests, accounts.unaccounted_total) == (3, 2)
    assert [(each.kind, each.under) for each in accounts.unaccounted] == [("before", []), ("after", [])]


def test_only_waits_that_reach_into_a_fault_are_its_cost() -> None:
    """The first stream waits from 1.0 over the kill at 1.1 to 1.5; the second had its longest pause before, and the
    last one began after all was whole again."""
    accounts = Accounts()
    accounts.faults += [Fault("decode-0", "kill", 1.1), Fault("gateway", "kill", 5.0, 6.0)]
    accounts.time(0.7, [0.8, 0.9, 1.0, 1.5, 1.6])
    accounts.time(0.1, [0.2, 0.9, 1.0, 1.2, 1.3])
    accounts.faults[0].back_s = 4.1
    accounts.time(4.2, [4.5, 4.7])
    assert (accounts.waits.ttft_s, accounts.waits.pause_s) == pytest.approx((0.3, 0.7))
    assert [fault.waits for fault in accounts.faults] == [Waits(pause_s=0.5), Waits()]
    accounts.time(4.0, [5.5])
    assert accounts.faults[1].waits == Waits(ttft_s=1.5)
