"""Agents: sessions of many turns, each with all that was said before, behind one of a few system prompts.

Rows of a workload are turns: as many of them as come in a row make a session, which begins when its first one would
arrive. A turn's prompt is the system prompt, all questions and answers before it, and its own question.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cohort.common.workloads.items import WorkItem, Workload

_BLOCK = 64
"""Tokens of a hash id."""
_SYSTEMS = 4
"""System prompts."""


@dataclass(frozen=True, slots=True)
class Agents:
    """`turns` of a session and seconds between them, `gap_s`: means of a geometric and an exponential distribution.
    `system`: tokens of a system prompt. A session ends before its context is longer than `longest`."""

    turns: float = 8.0
    gap_s: float = 10.0
    system: int = 2048
    longest: int = 26_000


def sessions(workload: Workload, agents: Agents, *, until_s: float, seed: int) -> Workload:
    """Make sessions of a workload's items; turns that would arrive from `until_s` on are left out."""
    draw = np.random.default_rng([seed, 0])
    turns: list[WorkItem] = []
    left = session = said = 0
    arrival_s = 0.0
    for item in workload.items:
        if left and said + item.prompt_tokens + item.output_tokens <= agents.longest:
            arrival_s += float(draw.exponential(agents.gap_s))
        else:
            session, said, arrival_s = session + 1, agents.system, item.arrival_s
            left = int(draw.geometric(1.0 / agents.turns))
        said += item.prompt_tokens
        if arrival_s < until_s:
            turns.append(
                replace(
                    item,
                    arrival_s=arrival_s,
                    prompt_tokens=said,
                    hash_ids=_blocks(session, said, agents.system),
                    hash_block=_BLOCK,
                )
            )
        said, left = said + item.output_tokens, left - 1
    return replace(workload, items=tuple(sorted(turns, key=lambda item: item.arrival_s)))


def _blocks(session: int, tokens: int, system: int) -> tuple[int, ...]:
    """Return ids of the blocks of a prompt: of a system prompt's those that all its sessions have."""
    shared = system // _BLOCK
    count = -(-tokens // _BLOCK)
    own = range(shared, count)
    first = (session << 12) + _SYSTEMS * shared  # no context has as many blocks
    return (*range((session % _SYSTEMS) * shared, (session % _SYSTEMS + 1) * shared), *(first + at for at in own))
