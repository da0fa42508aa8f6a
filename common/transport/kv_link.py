"""The KV link: moves block bytes between two workers' memories, outside the control messages.

Implementations: `ucx_link.UcxLink` (NVLink, RDMA, shared memory or TCP, chosen by UCX), and `zmq_link.ZmqLink` where
UCX is not installed or failed. The receiver always grants first, so `receive` names buffers that exist. Buffers are
contiguous and support the buffer protocol or `__cuda_array_interface__`.
"""

from __future__ import annotations

from typing import Protocol


class KvLink(Protocol):
    name: str
    """"ucx" or "zmq": the key of `KvGrant.links`."""

    def address(self) -> bytes:
        """Return the address at which senders reach this process; travels in `KvGrant`."""

    async def send(self, peer: bytes, tag: int, buffer: object, *, timeout_s: float) -> None:
        """Send one buffer to the process with that address, matched by the 64-bit tag. Returns when the buffer may be
        reused. Raises `TransferTimeout` after `timeout_s` (the peer is dead or does not receive) and `TransferError` on
        any other failure; on return or raise the link no longer reads the buffer."""

    async def receive(self, tag: int, buffer: object, *, timeout_s: float) -> None:
        """Receive exactly one buffer sent under this tag, in place. Raises like `send`, also when the length differs.
        On return or raise nothing writes into the buffer any more: only then may its blocks be freed. Cancelling the
        awaiting task gives the same guarantee. The one exception, for both directions, is `BufferStranded`: the link
        could not stop the operation yet, so the buffer stays unused until its `settled` is done."""

    def path(self, peer: bytes) -> str:
        """Return the "transport/device" by which bytes reach that address, several joined by "+"; "" until the first
        transfer there has ended."""

    def forget(self, peer: bytes) -> None:
        """Drop what is kept for the process with that address, which is gone."""

    async def close(self) -> None: ...
