from __future__ import annotations

from cohort.common.machines.gateway.peers import ManagerLink
from cohort.common.messages import ClusterLoad, GatewayHello, ManagerHello

HELLO = GatewayHello("gateway", 1, "memory://gateway")
LOAD = ClusterLoad(True, ["w"], 0, 0, 0, 10, 10, 100, 1.0)


def link() -> ManagerLink:
    return ManagerLink(HELLO, load_interval_s=0.2)


def greeted(one: ManagerLink, now_s: float, incarnation: int = 7) -> bool:
    one.note_alive(now_s, "manager")
    return one.on_hello(now_s, "manager", ManagerHello(incarnation))


def greeting(one: ManagerLink, now_s: float) -> GatewayHello | None:
    """Of the one manager there is, if it is due."""
    greetings = one.due_hellos(now_s)
    assert [name for name, _ in greetings] in ([], ["manager"])
    return greetings[0][1] if greetings else None


def test_it_greets_until_answered_and_soon_again_when_loads_are_overdue() -> None:
    one = link()
    assert greeting(one, 0.0) == HELLO
    assert greeting(one, 0.1) is None  # several a second, not more
    assert greeting(one, 0.25) == HELLO
    assert greeted(one, 1.1)
    assert greeting(one, 1.5) is None and one.known(1.5)
    one.note_alive(2.5, "manager")
    assert greeting(one, 3.0) is None
    assert not one.known(3.2)
    assert greeting(one, 3.2) == HELLO
    assert one.due_s() == 3.2 + 0.2
    one.note_alive(3.25, "manager")
    assert one.known(3.3) and greeting(one, 3.5) is None


def test_a_greeting_names_the_workers_of_the_last_load_of_any_manager() -> None:
    one = link()
    greeted(one, 0.0)
    one.on_load(LOAD)
    greeted(one, 1.0, incarnation=8)
    assert one.load is None
    assert one.hello(1.0) == GatewayHello("gateway", 1, "memory://gateway", ["w"])


def test_only_a_new_incarnation_is_a_stranger() -> None:
    one = link()
    assert greeted(one, 0.0)
    assert not greeted(one, 5.0)
    assert greeted(one, 6.0, incarnation=8)


def test_readiness_has_a_reason() -> None:
    one = link()
    assert "not answered" in (one.not_ready_because(0.0) or "")
    greeted(one, 0.0)
    assert "not reported" in (one.not_ready_because(0.0) or "")
    one.note_alive(0.1, "manager")
    one.on_load(LOAD)
    assert one.not_ready_because(0.2) is None
    assert "silent for 2.4 s" in (one.not_ready_because(2.5) or "")
    one.note_alive(3.0, "manager")
    one.on_load(ClusterLoad(False, [], 0, 0, 0, 0, 0, 0, 0.0))
    assert "no worker" in (one.not_ready_because(3.0) or "")


NO_WORKER = ClusterLoad(False, [], 0, 0, 0, 0, 0, 0, 0.0)


def test_readiness_outlasts_a_takeover_and_not_the_loss_of_all_workers() -> None:
    one = ManagerLink(HELLO, load_interval_s=0.2, managers=("manager", "manager-1"))
    one.on_hello(0.0, "manager", ManagerHello(7, epoch=8))
    one.on_load(LOAD)
    one.on_hello(0.0, "manager-1", ManagerHello(9, epoch=0, leads=False))
    assert one.on_hello(0.7, "manager-1", ManagerHello(9, epoch=17))
    assert one.load is None and one.not_ready_because(0.7) is None
    one.on_load(NO_WORKER)  # it has taken over and no worker has registered yet
    assert one.not_ready_because(0.8) is None
    one.on_load(LOAD)
    assert one.not_ready_because(1.0) is None
    one.note_alive(2.9, "manager-1")
    one.on_load(NO_WORKER)
    assert "no worker" in (one.not_ready_because(2.9) or "")
    assert one.on_hello(3.0, "manager-1", ManagerHello(10, epoch=25))  # after one that could not serve
    assert "not reported" in (one.not_ready_because(3.0) or "")


def test_a_manager_that_took_over_and_fell_silent_is_said_to_be() -> None:
    one = link()
    greeted(one, 0.0)
    one.on_load(LOAD)
    greeted(one, 1.0, incarnation=8)
    assert one.not_ready_because(2.9) is None
    assert "silent for 2.1 s" in (one.not_ready_because(3.1) or "")


def test_a_new_manager_does_not_inherit_the_old_ones_view() -> None:
    one = link()
    greeted(one, 0.0)
    one.on_load(LOAD)
    greeted(one, 1.0, incarnation=8)
    assert one.load is None
