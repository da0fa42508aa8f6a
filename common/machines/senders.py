"""Authority of senders: a message counts only from the peer that it names.

Called by the gateway's and the manager's machines and by the hosts of workers and monitor, before anything else is done
with a message. The peer's name is the identity of its connection, as far as the transport proves it: on Unix sockets
the peer runs as the same user, with CURVE it holds the cluster's key; neither proves which member.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import cast, get_args

from cohort.common.messages import (
    AttemptsLost,
    BindSegment,
    ClusterLoad,
    Farewell,
    GatewayHello,
    GatewayView,
    Heartbeat,
    KvOffer,
    Leaving,
    ManagerHello,
    ManagerView,
    Message,
    Placed,
    Predicted,
    PrefetchKv,
    Refused,
    Registered,
    RegisterWorker,
    SegmentEnded,
    StartSegment,
    Submit,
    TokenBatch,
    WorkerReport,
    WorkerView,
)
from cohort.common.types import InstanceId

_Workers = TokenBatch | RegisterWorker | WorkerReport | SegmentEnded | Leaving | KvOffer | WorkerView
_Signed = _Workers | GatewayHello | Heartbeat | Farewell | GatewayView | ManagerView
_ManagersOwn = (
    ManagerHello | Placed | AttemptsLost | Refused | ClusterLoad | Registered | StartSegment | BindSegment | PrefetchKv
)
# By type: of a union every member would be tried in turn, for every message of every machine.
_SIGNED, _MANAGERS_OWN = frozenset(get_args(_Signed)), frozenset(get_args(_ManagersOwn))


def may_send(
    sender: InstanceId,
    message: Message,
    *,
    managers: Collection[InstanceId] = ("manager",),
    predictor: InstanceId = "predictor",
) -> bool:
    """Return False for a message in another instance's name, or of a manager or predictor from another sender."""
    kind = type(message)
    if kind in _SIGNED:
        return cast(_Signed, message).instance == sender
    if isinstance(message, Submit):
        return message.request.gateway == sender
    if isinstance(message, Predicted):
        return sender == predictor
    return sender in managers or kind not in _MANAGERS_OWN
