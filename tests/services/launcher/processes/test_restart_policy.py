from __future__ import annotations

from cohort.common.process import service
from cohort.services.launcher.processes.restart_policy import (
    EXIT_NO_DEVICE,
    REPLACED_DELAY_S,
    GiveUp,
    Restart,
    RestartPolicy,
    exit_reason,
)


def ready_policy(now_s: float) -> RestartPolicy:
    policy = RestartPolicy()
    policy.started()
    policy.became_ready(now_s)
    return policy


def test_delays_double_up_to_five_seconds():
    policy = ready_policy(0.0)
    decisions = [policy.ended(1.0, 1) for _ in range(7)]
    assert decisions == [Restart(delay_s, "exit code 1") for delay_s in (0.0, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0)]


def test_ten_healthy_seconds_reset_the_delay():
    policy = ready_policy(0.0)
    for _ in range(4):
        policy.ended(1.0, 1)
    policy.started()
    policy.became_ready(10.0)
    assert policy.ended(19.9, 1) == Restart(1.6, "exit code 1")
    policy.started()
    policy.became_ready(50.0)
    assert policy.ended(60.0, 1) == Restart(0.0, "exit code 1")


def test_five_ends_before_it_was_ever_ready():
    policy = RestartPolicy()
    decisions = [policy.ended(float(second), 1) for second in range(5)]
    assert all(isinstance(decision, Restart) for decision in decisions[:4])
    assert decisions[4] == GiveUp("exit code 1: it never became ready in 5 attempts")


def test_a_configuration_error_is_not_repeated():
    assert RestartPolicy().ended(0.0, 2) == GiveUp("exit code 2: its configuration is wrong")


def test_a_worker_without_a_gpu_is_not_tried_in_a_loop():
    refused = RestartPolicy().ended(0.0, EXIT_NO_DEVICE)
    assert refused == GiveUp("exit code 75: every share of every GPU is taken")
    policy = ready_policy(0.0)
    for _ in range(3):
        decision = policy.ended(1.0, EXIT_NO_DEVICE)
        assert isinstance(decision, Restart) and decision.delay_s == 60.0


def test_the_services_and_the_launcher_mean_the_same_exit_code():
    assert EXIT_NO_DEVICE == service.EXIT_NO_DEVICE


def test_a_process_that_worked_once_is_never_given_up():
    policy = ready_policy(0.0)
    assert all(isinstance(policy.ended(1.0, 2), Restart) for _ in range(50))


def test_reasons_in_words():
    assert exit_reason(3) == "exit code 3"
    assert exit_reason(-11) == "killed by SIGSEGV"
    assert exit_reason(-9).startswith("killed by SIGKILL (")
    assert exit_reason(-500) == "killed by signal 500"


def test_a_worker_that_is_relieved_leaves_the_cores_to_the_one_that_takes_over() -> None:
    assert ready_policy(0.0).ended(20.0, 1, relieved=True) == Restart(REPLACED_DELAY_S, "exit code 1")
    assert ready_policy(0.0).ended(20.0, 1) == Restart(0.0, "exit code 1")
    policy = ready_policy(0.0)
    delays = [policy.ended(1.0, 1, relieved=True) for _ in range(6)]
    assert [each.delay_s for each in delays if isinstance(each, Restart)] == [2.0, 2.0, 2.0, 2.0, 2.0, 3.2]
