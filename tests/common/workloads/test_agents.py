"""Sessions of turns: each repeats what was said before, and no other session's."""

from __future__ import annotations

import itertools

import numpy as np

from cohort.common.workloads.agents import Agents, sessions
from cohort.common.workloads.items import WorkItem, Workload


def made(agents: Agents, *, count: int = 400, until_s: float = 1e9) -> list[WorkItem]:
    draw = np.random.default_rng(5)
    items = tuple(WorkItem(0.5 * at, int(draw.integers(1, 300)), int(draw.integers(1, 200))) for at in range(count))
    workload = sessions(Workload("w", items), agents, until_s=until_s, seed=3)
    workload.check()
    return list(workload.items)


def test_a_turn_has_all_that_was_said_before_it():
    agents = Agents(turns=4, gap_s=3, system=128, longest=4000)
    by_session: dict[int, list[WorkItem]] = {}
    for item in made(agents):
        assert len(item.hash_ids) == -(-item.prompt_tokens // item.hash_block)
        assert 128 < item.prompt_tokens <= 4000
        by_session.setdefault(item.hash_ids[2], []).append(item)
    turns = [len(of) for of in by_session.values()]
    assert 3 < np.mean(turns) < 5 and max(turns) > 8
    for of in by_session.values():
        for before, after in itertools.pairwise(of):
            assert after.arrival_s > before.arrival_s
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            whole = before.prompt_tokens // before.hash_block
            assert after.hash_ids[:whole] == before.hash_ids[:whole]
    systems = {of[0].hash_ids[:2] for of in by_session.values()}
    assert len(systems) == 4, "and sessions of one system prompt share nothing else"
    others = [set(of[-1].hash_ids[2:]) for of in by_session.values()]
    assert len(set.union(*others)) == sum(map(len, others))


def test_turns_beyond_the_end_are_left_out():
    items = made(Agents(turns=50, gap_s=20), until_s=60.0)
    assert items and max(item.arrival_s for item in items) < 60.0
