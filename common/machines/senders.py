"""Authority of senders: a message counts only from the peer that it names.

Called by the gateway's and the manager's machines and by the hosts of workers and monitor, before anything else is done
with a message. The peer's name is the identity of its connection. The worth of that name is the transport's business:
on Unix sockets the peer runs as the same user, with CURVE it holds the cluster's key; neither proves which member.
"""

from __future__ import annotations

from collections.abc import Collection

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

_Signed = (
    TokenBatch
    | GatewayHello
    | RegisterWorker
    | WorkerReport
    | SegmentEnded
    | Leaving
    | KvOffer
    | Heartbeat
    | Farewell
    | GatewayView
    | ManagerView
    | WorkerView
)
_ManagersOwn = (
    ManagerHello | Placed | AttemptsLost | Refused | ClusterLoad | Registered | StartSegment | BindSegment | PrefetchKv
)


def may_say(
    sender: InstanceId,
    message: Message,
    *,
    managers: Collection[InstanceId] = ("manager",),
    predictor: InstanceId = "predictor",
) -> bool:
    """False for a message that names another instance as its own, and for a manager's and the predictor's words from
    any other sender."""
    if isinstance(message, _Signed):
        return message.instance == sender
    if isinstance(message, Submit):
        return message.request.gateway == sender
    if isinstance(message, Predicted):
        return sender == predictor
    return sender in managers or not isinstance(message, _ManagersOwn)
