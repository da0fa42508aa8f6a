"""How much KV memory every worker has left: the reported free blocks, less

  * the growth of everything the report lists: to the end of its prompt on a worker that prefills, to the predicted
    peak of all outputs together on one that decodes, and
  * what was dispatched since and is in no report yet (a reservation, kept until a report names the request).

Owned by `controller.py`; read for every batch. Blocks of an accepted offer whose KV has not arrived count twice, which
errs on the safe side.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from cohort.common.policies.interface import ClusterView, InstanceView
from cohort.common.types import InstanceId, RequestId, WorkerStats

RESERVATION_S = 2.0
"""Time after which a dispatched request that no report named is not coming (refused, cancelled, rescheduled), or is
beyond what a report lists; the manager gives reports the same time."""


@dataclass(slots=True)
class _Account:
    """One worker; `stats` is the report `growth_blocks` was computed from."""

    stats: WorkerStats
    growth_blocks: int = 0
    reservations: dict[RequestId, tuple[float, int]] = field(default_factory=dict)
    """End and blocks of each reservation, by end."""
    reserved_blocks: int = 0

    def forget(self, request_id: RequestId) -> None:
        reservation = self.reservations.pop(request_id, None)
        if reservation is not None:
            self.reserved_blocks -= reservation[1]


class LiveMemory:
    def __init__(self) -> None:
        self._accounts: dict[InstanceId, _Account] = {}
        self._recent: set[RequestId] = set()
        """Requests that may have a reservation; most that are withdrawn have none."""

    def update(self, now_s: float, cluster: ClusterView) -> None:
        for name in self._accounts.keys() - cluster.instances.keys():
            del self._accounts[name]
        for name, view in cluster.instances.items():
            account = self._accounts.get(name)
            if account is None:
                self._accounts[name] = _Account(view.stats, _growth_blocks(view))
            elif account.stats is not view.stats:
                account.stats = view.stats
                account.growth_blocks = _growth_blocks(view)
                for work in view.stats.queue:
                    account.forget(work.request_id)
            if account is not None:
                for request_id, _ in list(takewhile(lambda each: each[1][0] <= now_s, account.reservations.items())):
                    account.forget(request_id)
        if len(self._recent) > 64 and not any(account.reservations for account in self._accounts.values()):
            self._recent.clear()

    def remaining_blocks(self, view: InstanceView) -> int:
        """Return M_remain of Eq. 5 in blocks; negative if more is promised than there is (prompts wait elsewhere)."""
        account = self._accounts[view.instance]
        return view.free_blocks - account.growth_blocks - account.reserved_blocks

    def idle(self, view: InstanceView) -> bool:
        """Return whether the worker has no request and none is on its way: one that fits at all fits now."""
        stats = view.stats
        present = stats.running + stats.waiting + stats.awaiting_kv + stats.parked
        return present == 0 and not self._accounts[view.instance].reservations

    def reserve(self, now_s: float, instance: InstanceId, request_id: RequestId, blocks: int) -> None:
        account = self._accounts[instance]
        if request_id in account.reservations:
            account.forget(request_id)
        self._recent.add(request_id)
        account.reservations[request_id] = (now_s + RESERVATION_S, blocks)
        account.reserved_blocks += blocks

    def withdraw(self, request_id: RequestId) -> None:
        """Delete the reservations of a request that was not placed after all."""
        if request_id in self._recent:
            self._recent.discard(request_id)
            for account in self._accounts.values():
                account.forget(request_id)


def _growth_blocks(view: InstanceView) -> int:
    """Return the blocks that the worker's sequences will still take at the worst moment; those beyond the report's list
    count like its mean."""
    stats, geometry = view.stats, view.capacity.geometry
    size = geometry.block_size
    peak = _peak_entries([(work.prefill_left + work.context, work.decode_left) for work in stats.queue], size)
    entries = max(0, peak - sum(-(-work.context // size) for work in stats.queue))
    if geometry.frees_behind_window:  # rows beyond it grow no more
        grown = [geometry.growth(work.context, work.prefill_left, work.decode_left) for work in stats.queue]
        entries = min(entries, sum(-(-tokens // size) for tokens in grown))
    growth = entries * geometry.num_groups
    present = stats.running + stats.waiting + stats.awaiting_kv + stats.parked
    listed = len(stats.queue)
    return -(-growth * present // listed) if 0 < listed < present else growth


def _peak_entries(rows: Sequence[tuple[int, int]], size: int) -> int:
    """Return the most blocks of `size` tokens that these rows ever hold together, each (tokens now, tokens to come).

    All grow by one token a step, and each leaves when it is done. Just before the k-th last leaves, the k last hold
    Σ ⌈(tokens + left_k) / size⌉; the peak is at one of these moments. ⌈(tokens + left) / size⌉ is the quotients of
    tokens and of left + size - 1, and one more where their remainders fill another block: a search for each row.
    """
    peak = full = 0
    remainders: list[int] = []
    for alive, (tokens, left) in enumerate(sorted(rows, key=lambda row: -row[1]), 1):
        full += tokens // size
        insort(remainders, tokens % size)
        more, rest = divmod(left + size - 1, size)
        peak = max(peak, full + alive * more + alive - bisect_left(remainders, size - rest))
    return peak
