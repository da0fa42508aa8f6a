"""How much KV memory every worker really has left: reported free blocks, less what is already spoken for.

A worker's report is a moment old, and what runs there still grows. So from the reported free blocks go

  * the growth of everything the report lists: to the end of its prompt on a worker that prefills, to the predicted
    peak of all outputs together on one that decodes, and
  * what was dispatched since and is in no report yet (a promise: kept until a report names the request).

Owned by `controller.py`; read for every batch. Blocks an offer was granted for but whose KV is still on its way count
twice for that moment: that errs on the safe side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cohort.common.policies.interface import ClusterView, InstanceView
from cohort.common.types import InstanceId, RequestId, WorkerFigures

PROMISE_S = 2.0
"""A dispatched request that no report named by then is not coming (refused, cancelled, displaced), or is beyond what
a report lists; the manager gives reports the same time."""


@dataclass(slots=True)
class _Account:
    """One worker; `figures` is the report `growth_blocks` was computed from."""

    figures: WorkerFigures
    growth_blocks: int = 0
    promised: dict[RequestId, tuple[float, int]] = field(default_factory=dict)
    """Until when, how many blocks."""
    promised_blocks: int = 0

    def forget(self, request_id: RequestId) -> None:
        promise = self.promised.pop(request_id, None)
        if promise is not None:
            self.promised_blocks -= promise[1]


class LiveMemory:
    def __init__(self) -> None:
        self._accounts: dict[InstanceId, _Account] = {}
        self._recent: set[RequestId] = set()
        """Everything that may have a promise; most requests that are asked about have none."""

    def update(self, now_s: float, cluster: ClusterView) -> None:
        """Take the newest reports in. Costs nothing for a worker that has not reported since."""
        for name in self._accounts.keys() - cluster.instances.keys():
            del self._accounts[name]
        for name, view in cluster.instances.items():
            account = self._accounts.get(name)
            if account is None:
                self._accounts[name] = _Account(view.figures, _growth_blocks(view))
            elif account.figures is not view.figures:
                account.figures = view.figures
                account.growth_blocks = _growth_blocks(view)
                for work in view.figures.queue:
                    account.forget(work.request_id)
            if account is not None:
                self._expire(now_s, account)
        if len(self._recent) > 64 and not any(account.promised for account in self._accounts.values()):
            self._recent.clear()

    @staticmethod
    def _expire(now_s: float, account: _Account) -> None:
        """Promises are made in order of time, so the overdue ones come first."""
        overdue = []
        for request_id, (until_s, _) in account.promised.items():
            if until_s > now_s:
                break
            overdue.append(request_id)
        for request_id in overdue:
            account.forget(request_id)

    def remaining_blocks(self, view: InstanceView) -> int:
        """M_remain of Eq. 5 in blocks; negative while more is promised than there is (prompts waiting elsewhere)."""
        account = self._accounts[view.instance]
        return view.free_blocks - account.growth_blocks - account.promised_blocks

    def idle(self, view: InstanceView) -> bool:
        """Nothing is there and nothing is on its way: whatever fits at all fits now."""
        figures = view.figures
        here = figures.running + figures.waiting + figures.awaiting_kv + figures.parked
        return here == 0 and not self._accounts[view.instance].promised

    def promise(self, now_s: float, instance: InstanceId, request_id: RequestId, blocks: int) -> None:
        """`blocks` of `instance` are this request's from now on."""
        account = self._accounts[instance]
        if request_id in account.promised:
            account.forget(request_id)
        self._recent.add(request_id)
        account.promised[request_id] = (now_s + PROMISE_S, blocks)
        account.promised_blocks += blocks

    def withdraw(self, request_id: RequestId) -> None:
        """It was not placed after all."""
        if request_id in self._recent:
            self._recent.discard(request_id)
            for account in self._accounts.values():
                account.forget(request_id)


def _growth_blocks(view: InstanceView) -> int:
    """Blocks that what the report lists will still take at the worst moment to come; what is beyond the list counts
    like its mean. Rows end in a partial block as they do now, so tokens are counted and rounded once."""
    figures = view.figures
    if view.role.decodes:
        final = _peak_tokens([(work.prefill_left + work.context, work.decode_left) for work in figures.queue])
    else:  # it hands over before the answer grows
        final = sum(work.prefill_left + work.context for work in figures.queue)
    growth = view.capacity.geometry.blocks_for(max(0, final - sum(work.context for work in figures.queue)))
    everybody = figures.running + figures.waiting + figures.awaiting_kv + figures.parked
    listed = len(figures.queue)
    return -(-growth * everybody // listed) if 0 < listed < everybody else growth


def _peak_tokens(rows: Sequence[tuple[int, int]]) -> int:
    """The most tokens these rows ever hold together, each (tokens now, tokens still to come).

    All grow by one token a step, and each leaves when it is done. Just before the k-th last leaves, the k last hold
    Σ tokens + k · left_k; the peak is at one of these moments. Adding up everybody's final size instead would let a
    fifth of the memory lie idle on short answers, for they do not all end at once.
    """
    peak = held = 0
    for alive, (tokens, left) in enumerate(sorted(rows, key=lambda row: -row[1]), 1):
        held += tokens
        peak = max(peak, held + alive * left)
    return peak
