"""Seconds to hand KV from one worker to another, by the rate that was measured between the two.

Workers report the rates of their links (`WorkerStats.link_rates`). Of a pair without a measurement, what others
measured to the same receiver counts, because a slow link is mostly the receiver's; then the placement's own guess.
"""

from __future__ import annotations

from collections.abc import Mapping

from cohort.common.policies.interface import InstanceView
from cohort.common.types import InstanceId

Views = Mapping[InstanceId, InstanceView]


def link_rate(views: Views, sender: InstanceId, receiver: InstanceId) -> float | None:
    """Return bytes a second; None where nothing was measured."""
    own = views[sender].stats.link_rates.get(receiver) if sender in views else None
    if own:
        return own
    others = [rate for view in views.values() if (rate := view.stats.link_rates.get(receiver))]
    return sum(others) / len(others) if others else None


def transfer_seconds(
    views: Views, sender: InstanceId, receiver: InstanceId, tokens: int, *, unmeasured_s: float
) -> float:
    """Return the seconds to send the KV of `tokens` positions; `unmeasured_s` where no rate is known."""
    rate = link_rate(views, sender, receiver)
    if rate is None:
        return unmeasured_s
    return tokens * views[sender].capacity.geometry.token_bytes / rate
