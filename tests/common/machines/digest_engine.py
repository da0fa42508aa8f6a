"""An engine whose KV notices every wrong byte.

Each worker's cache is a list of slots. Computing position p writes a digest of tokens[:p+1] into its slot and first
checks that all earlier slots of the row hold exactly the digests they should: stale, foreign, lost or half-transferred
KV fails at once; where the model has a window, only the slots that its position sees are checked. With groups of layers
there is a slot in each, and no two hold the same. The next token is a digest too, so a request's output is known
beforehand whatever happens on the way.

Steps are planned ahead, if wanted: some time into a step the engine asks for the next one, and begins it when the step
has ended, with the tokens that it sampled itself, whatever the machine has been told by then.

Rows that may carry drafts get some, each right with a given chance; the KV of wrong ones stays in their slots, where no
other row may ever find it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from cohort.common.machines.effects import StartStep
from cohort.common.machines.events import Drafted, PlanAhead, Sampled, StepEnded, Tick
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.kv_interface import NO_BLOCK, KvCopy
from cohort.common.policies.padding import row_padding
from cohort.common.sequence import Row
from cohort.common.types import Attempt
from cohort.common.virtual_cluster.plugins import Flight, WorkerNode

if TYPE_CHECKING:
    from cohort.common.virtual_cluster.cluster import VirtualCluster

BLOCK = 4
VOCABULARY = 50
STOP_TOKEN = 8
"""An even one: of each output all digests but the first are."""


def digests(tokens: list[int]) -> list[int]:
    """Of everything that these begin with, the shortest first."""
    value, found = 17, []
    for token in tokens:
        value = (value * 1_000_003 ^ token) & 0xFFFF_FFFF_FFFF
        found.append(value)
    return found


def next_token(tokens: list[int]) -> int:
    return digests([*tokens, 99])[-1] % VOCABULARY


def silent(events: tuple[object, ...], effects: list[object]) -> bool:
    """Whether only time has passed: what that breaks is still broken when something happens, or at the end."""
    return not effects and all(type(event) is Tick for event in events)


def adapted(adapter: str) -> list[int]:
    """What every digest of a request with this adapter begins with: KV of one adapter is wrong for another."""
    return [1_000 + ord(letter) for letter in adapter]


def expected_output(prompt: list[int], max_tokens: int, adapter: str = "") -> list[int]:
    tokens, first = list(prompt), adapted(adapter)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(first + tokens))
        if tokens[-1] == STOP_TOKEN:
            break
    return tokens[len(prompt) :]


@dataclass(slots=True)
class Memory:
    """One worker's slots on the device and in host memory."""

    device: list[int]
    host: list[int]

    def move(self, copy: KvCopy) -> None:
        size = BLOCK if copy.unit == "block" else 1
        for device, host in zip(copy.device, copy.host, strict=True):
            assert min(device, host) >= 0
            d, h = slice(device * size, device * size + size), slice(host * size, host * size + size)
            if copy.direction == "out":
                self.host[h] = self.device[d]
            else:
                self.device[d] = self.host[h]


@dataclass(slots=True, eq=False)
class Begun:
    """A step that was given to the engine. `tables`: its rows' blocks by then, of every group of layers."""

    plan: IterationPlan
    tables: list[list[list[int]]]
    drafts: dict[Attempt, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Device:
    """The steps of one worker: running, and behind it; and the tokens that the last one sampled."""

    steps: list[Begun] = field(default_factory=list)
    sampled: dict[Attempt, int] = field(default_factory=dict)


class DigestEngine:
    """Steps of 5 ms and 1 ms a token, over `blocks` and `host_blocks` of `BLOCK` slots a worker. `plan_ahead`: the next
    step is asked for at some moment of every step."""

    def __init__(
        self,
        cluster: VirtualCluster,
        random: Random,
        blocks: int,
        host_blocks: int,
        *,
        plan_ahead: bool = True,
        acceptance: float = 0.0,
        lateness: float = 0.0,
    ) -> None:
        """`acceptance`: the chance of a drafted token to be right. `lateness`: that of a row to give no token, as if
        its grammar's mask were not ready."""
        self._cluster = cluster
        self._random = random
        self._sizes = (blocks * BLOCK, host_blocks * BLOCK)
        self._memories: dict[WorkerNode, Memory] = {}
        self._devices: dict[WorkerNode, Device] = {}
        # Of its own, so that all else happens as without.
        self._moments = Random(17) if plan_ahead else None
        self._acceptance, self._guesses = acceptance, Random(18)
        self._lateness, self._chances, self.late_rows = lateness, Random(19), 0

    def memory(self, node: WorkerNode) -> Memory:
        memory = self._memories.get(node)
        if memory is None:  # of a process that was just started: nothing in it means anything
            device, host = self._sizes
            memory = Memory([self._random.getrandbits(40) for _ in range(device)], [0] * host)
            self._memories[node] = memory
        return memory

    def begin(self, node: WorkerNode, step: StartStep) -> None:
        device, kv = self._devices.setdefault(node, Device()), node.worker.kv
        assert len(device.steps) <= step.ahead
        drafts = {row.sequence.key: self._drafts(row) for row in step.plan.rows if row.drafts}
        assert not (step.ahead and (drafts or any(begun.drafts for begun in device.steps)))
        tables = [[list(table) for table in kv.tables(row.sequence.key)] for row in step.plan.rows]
        device.steps.append(Begun(step.plan, tables, {key: tokens for key, tokens in drafts.items() if tokens}))
        if len(device.steps) == 1:  # one that is ahead finds none where the host was stopped meanwhile
            self._run(node, device)

    def _run(self, node: WorkerNode, device: Device) -> None:
        """The first of the device's steps starts now."""
        begun = device.steps[0]
        computed = begun.plan.tokens + sum(map(len, begun.drafts.values()))
        now_s, takes_s = self._cluster.now_s, 0.005 + 0.001 * computed
        if self._moments is not None and not begun.drafts:
            self._cluster.events.at(now_s + self._moments.random() * takes_s, self._ask_ahead, node, begun)
        self._cluster.events.at(now_s + takes_s, self._end, node, begun)

    def _ask_ahead(self, node: WorkerNode, begun: Begun) -> None:
        if node.alive and begun in self._devices[node].steps[:1]:
            guesses = self._guesses
            expected = [row.sequence.key for row in begun.plan.rows if guesses.random() < self._acceptance]
            self._cluster.feed(node, PlanAhead(expected))

    def _drafts(self, row: Row) -> list[int]:
        """Of a row that may have some: as many as it may, or fewer, or none."""
        guesses, first = self._guesses, adapted(row.sequence.request.adapter)
        tokens = list(row.sequence.tokens)
        assert row.start + 1 == len(tokens) and row.count == 1
        for _ in range(guesses.choice([0, 1, row.drafts, row.drafts])):
            right = next_token(first + tokens)
            tokens.append(right if guesses.random() < self._acceptance else (right + 1) % VOCABULARY)
        return tokens[row.start + 1 :]

    def before_events(self, node: WorkerNode, events: tuple[object, ...]) -> None:
        pass

    def after_events(self, node: WorkerNode, events: tuple[object, ...], effects: list[object]) -> None:
        if not silent(events, effects):
            node.worker.check()

    def died(self, node: WorkerNode) -> None:
        self._memories.pop(node, None)
        self._devices.pop(node, None)

    def copy(self, flight: Flight) -> None:
        sender, receiver = flight.sender, flight.receiver
        assert sender is not None and receiver is not None
        source_memory, target_memory = self.memory(sender), self.memory(receiver)
        source_slots = source_memory.host if flight.from_host else source_memory.device
        for source, target in zip(flight.sent, flight.posted, strict=True):
            assert min(source.source, target.target) >= 0
            length = source.num_blocks * BLOCK
            start, end = source.source * BLOCK, target.target * BLOCK
            target_memory.device[end : end + length] = source_slots[start : start + length]

    def corrupt(self, flight: Flight) -> None:
        assert flight.receiver is not None
        slots = self.memory(flight.receiver).device
        for run in flight.posted:
            first = run.target * BLOCK
            slots[first : first + run.num_blocks * BLOCK] = [-1] * (run.num_blocks * BLOCK)

    def _end(self, node: WorkerNode, begun: Begun) -> None:
        if not node.alive:
            return
        memory, device, plan = self.memory(node), self._devices[node], begun.plan
        assert device.steps.pop(0) is begun
        for copy in plan.copies:
            if not copy.concurrent:
                memory.move(copy)
        sampled, late = self._rows(node, begun, memory.device, device.sampled)
        device.sampled = {each.attempt: each.token for each in sampled}
        for copy in plan.copies:  # as late as can be: no row may need them
            if copy.concurrent:
                memory.move(copy)
        if device.steps:  # it does not wait for the host
            self._run(node, device)
        taken_s = 0.005 + 0.001 * (plan.tokens + sum(map(len, begun.drafts.values())))
        self._cluster.feed(node, StepEnded(sampled, taken_s, drafts=self._judged(begun, sampled), late=late))

    def _judged(self, begun: Begun, sampled: list[Sampled]) -> list[Drafted]:
        """What came of the drafts, and of others that were only expected."""
        counts = Counter([each.attempt for each in sampled])
        judged = [Drafted(key, len(tokens), counts[key] - 1) for key, tokens in begun.drafts.items() if counts[key]]
        if self._acceptance and begun.plan.watched:
            others = [key for key in counts if key not in begun.drafts]
            judged += [
                Drafted(key, 1, int(self._guesses.random() < self._acceptance), computed=False) for key in others
            ]
        return judged

    def _rows(
        self, node: WorkerNode, begun: Begun, slots: list[int], before: dict[Attempt, int]
    ) -> tuple[list[Sampled], list[Attempt]]:
        plan, kv, sampled, late = begun.plan, node.worker.kv, list[Sampled](), list[Attempt]()
        padding = row_padding(plan.rows, plan.padded_to, kv) if plan.padded_to else [0] * len(plan.rows)
        windows = kv.geometry.windows
        for row, tables, filled in zip(plan.rows, begun.tables, padding, strict=True):
            tokens, adapter = row.sequence.tokens, row.sequence.request.adapter
            first = adapted(adapter)
            assert not adapter or adapter in node.worker.adapters.adapters, f"{node.name} does not hold {adapter}"
            if row.start == len(tokens):  # planned ahead, and the host does not know the token, or will not
                # Without one it is computed in vain: what it writes nobody may read.
                tokens = [*tokens, before.get(row.sequence.key, -1) if self._lateness else before[row.sequence.key]]
            drafted = begun.drafts.get(row.sequence.key, [])
            known, tokens = len(tokens), [*tokens, *drafted]
            end = row.start + row.count + len(drafted)
            directions = kv.directions(row.sequence.key)
            seen_from = [max(0, row.start + 1 - window) if window else 0 for window in windows]
            whole = digests(first + tokens[:end])[len(first) :]
            for position in range(min(seen_from), end):
                offset = position % BLOCK
                if directions is not None and directions[position // BLOCK]:
                    offset = BLOCK - 1 - offset
                for group, (blocks, seen) in enumerate(zip(tables, seen_from, strict=True)):
                    if position < seen:
                        continue
                    block, value = blocks[position // BLOCK], whole[position] + group
                    assert block != NO_BLOCK, f"{row.sequence.key} has no block at position {position}"
                    slot = block * BLOCK + offset
                    if position < row.start:
                        assert slots[slot] == value, (
                            f"{node.name}: {row.sequence.key} reads wrong KV at position {position} in group {group}"
                        )
                    else:
                        slots[slot] = value
            for position in range(row.start + row.count, row.start + row.count + filled):
                for blocks in tables:
                    slots[blocks[position // BLOCK] * BLOCK + position % BLOCK] = -1  # the engine writes there too
            if row.start + row.count == known:
                if self._lateness and (tokens[row.start] == -1 or self._chances.random() < self._lateness):
                    late.append(row.sequence.key)
                    continue
                for count in range(known, len(tokens) + 1):
                    sampled.append(Sampled(row.sequence.key, next_token(first + tokens[:count])))
                    if tokens[count : count + 1] != [sampled[-1].token]:
                        break
        self.late_rows += len(late)
        return sampled, late
