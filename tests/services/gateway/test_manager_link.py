from __future__ import annotations

from cohort.common.messages import ClusterLoad, GatewayHello, ManagerHello
from cohort.services.gateway.manager_link import ManagerLink

HELLO = GatewayHello("gateway", 1, "memory://gateway")
LOAD = ClusterLoad(True, ["w"], 0, 0, 0, 10, 10, 100, 1.0)


def link() -> ManagerLink:
    return ManagerLink(HELLO, silence_s=2.0)


def test_it_greets_until_answered_and_again_after_silence() -> None:
    one = link()
    assert one.greeting(0.0) == HELLO
    assert one.greeting(1.0) == HELLO
    assert one.on_hello(1.1, ManagerHello(7))
    assert one.greeting(2.0) is None
    one.heard(2.5)
    assert one.greeting(4.4) is None
    assert one.greeting(4.5) == HELLO


def test_only_a_new_incarnation_is_a_stranger() -> None:
    one = link()
    assert one.on_hello(0.0, ManagerHello(7))
    assert not one.on_hello(5.0, ManagerHello(7))
    assert one.on_hello(6.0, ManagerHello(8))


def test_readiness_has_a_reason() -> None:
    one = link()
    assert "not answered" in (one.not_ready_because(0.0) or "")
    one.on_hello(0.0, ManagerHello(7))
    assert "not reported" in (one.not_ready_because(0.0) or "")
    one.on_load(0.1, LOAD)
    assert one.not_ready_because(0.2) is None
    assert "silent for 2.4 s" in (one.not_ready_because(2.5) or "")
    one.on_load(3.0, ClusterLoad(False, [], 0, 0, 0, 0, 0, 0, 0.0))
    assert "no worker" in (one.not_ready_because(3.0) or "")


def test_a_new_manager_does_not_inherit_the_old_ones_view() -> None:
    one = link()
    one.on_hello(0.0, ManagerHello(7))
    one.on_load(0.0, LOAD)
    one.on_hello(1.0, ManagerHello(8))
    assert one.load is None
