from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from cohort.services.cli.status import render


def process(instance: str, *, ready: bool = True, **stats: float) -> dict[str, Any]:
    return {
        "instance": instance,
        "role": "bucketing_manager" if instance.startswith("manager") else "gateway",
        "status": "up",
        "ready": ready,
        "age_s": 0.1,
        "since_s": 5.0,
        "restarts": 0,
        "stats": stats,
    }


def shown(*processes: dict[str, Any]) -> list[str]:
    state = {
        "name": "p", "model": "m", "samples": {}, "arrival_rate": 0.0, "arrival_rate_forecast": 0.0,
        "processes": list(processes),
    }  # fmt: skip
    console = Console(width=140)
    with console.capture() as captured:
        console.print(render(state))
    return captured.get().splitlines()


def line(lines: list[str], instance: str) -> str:
    (found,) = [each for each in lines if each.split()[:1] == [instance]]
    return found


def test_of_several_managers_it_says_which_one_leads() -> None:
    lines = shown(process("gateway"), process("manager", leads=0.0), process("manager-1", ready=False, leads=1.0))
    assert "ready, stands by" in line(lines, "manager")
    assert "not ready, leads" in line(lines, "manager-1")
    assert "leads" not in line(lines, "gateway")


@pytest.mark.parametrize("leads", [0.0, 1.0])
def test_of_one_manager_nothing_is_said(leads: float) -> None:
    assert not {"leads", "stands"} & set(line(shown(process("manager", leads=leads)), "manager").split())
