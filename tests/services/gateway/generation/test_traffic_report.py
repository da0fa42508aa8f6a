"""What the planner is told of a gateway's requests: lengths and times, once at the start and once at the end."""

from __future__ import annotations

import msgspec
import pytest

from cohort.common.codec import encode
from cohort.common.machines.entry import Entry
from cohort.common.messages import RequestTraffic
from cohort.common.types import Attempt, FinishReason, Request, SamplingParams, Slo
from cohort.services.gateway.generation.delta import GatewayTimes
from cohort.services.gateway.generation.traffic_report import TrafficReport


class Clock:
    now = 100.0

    def now_s(self) -> float:
        return self.now

    def wall_s(self) -> float:
        return self.now


def entry(name: str = "chosen-by-client", *, tokens: int = 5) -> Entry:
    request = Request(
        Attempt(name, 0), "gateway", [7777] * 5, 5, SamplingParams(64), 0.0, slo=Slo(ttft_s=1.0), prefix_salt="salt"
    )
    made = Entry(request, 100.0, 4000.0)
    made.output = [8888] * tokens
    made.first_token_s, made.last_token_s = (100.5, 101.3) if tokens else (None, None)
    return made


def test_a_request_is_told_when_it_comes_and_when_it_ends():
    clock, one = Clock(), entry()
    report = TrafficReport(clock)
    report.admitted(one.request)
    clock.now = 101.0
    (arrived,) = report.take()
    assert (arrived.number, arrived.age_s, arrived.prompt_tokens, arrived.timing) == (0, 1.0, 5, None)
    assert arrived.slo == Slo(ttft_s=1.0)
    clock.now = 102.0
    report.ended(101.4, one, GatewayTimes(99.9), FinishReason.LENGTH)
    (ended,) = report.take()
    assert (ended.number, ended.age_s, ended.output_tokens) == (0, 2.0, 5)
    assert ended.timing is not None
    assert (ended.timing.ttft_s, ended.timing.tpot_s, ended.timing.e2e_s) == pytest.approx((0.6, 0.2, 1.5))
    assert report.take() == []


@pytest.mark.parametrize("finish", [FinishReason.FAILED, FinishReason.CANCELLED])
def test_failures_are_late_and_what_a_client_ended_is_not_judged(finish: FinishReason):
    report, one = TrafficReport(Clock()), entry(tokens=0)
    report.admitted(one.request)
    report.ended(101.0, one, GatewayTimes(100.0), finish)
    _, ended = report.take()
    assert ended.timing is not None and ended.timing.e2e_s < 0
    assert ended.cancelled is (finish is FinishReason.CANCELLED)


def test_neither_tokens_nor_names_nor_salts_leave():
    report, one = TrafficReport(Clock()), entry()
    report.admitted(one.request)
    report.ended(101.0, one, GatewayTimes(100.0), FinishReason.STOP)
    wire = encode(RequestTraffic("gateway", 1, report.take()))
    decoded = msgspec.msgpack.decode(wire)
    assert b"chosen-by-client" not in wire and b"salt" not in wire
    assert "7777" not in str(decoded) and "8888" not in str(decoded)


def test_memory_is_bounded_while_the_monitor_is_away():
    report = TrafficReport(Clock())
    for index in range(10_000):
        report.admitted(entry(str(index)).request)
    assert len(report.take()) == 4096
