"""Opens the KV links a configuration asks for, best first.

Called by a worker at start. A link that cannot be opened is skipped with one warning; none at all is an error. Decides
nothing later: which link a transfer takes is the transfer agent's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from cohort.common.errors import ConfigError, TransferError
from cohort.common.transport.kv_link import KvLink
from cohort.common.transport.security import CurveKeys

log = structlog.get_logger(__name__)


def open_links(
    names: Sequence[str], *, zmq_bind: str, zmq_advertise: str = "", curve: CurveKeys | None = None
) -> list[KvLink]:
    """`names` as in `transfer.links`. Call it on the event loop that will use them."""
    links: list[KvLink] = []
    for name in names:
        try:
            match name:
                case "ucx":
                    from cohort.common.transport.ucx_link import UcxLink

                    links.append(UcxLink())
                case "zmq":
                    from cohort.common.transport.zmq_link import ZmqLink

                    links.append(ZmqLink(zmq_bind, curve, advertise=zmq_advertise))
                case _:
                    raise ConfigError(f"transfer.links: no link named {name!r}; there are: ucx, zmq")
        except TransferError as error:
            log.warning("KV link not available, using the next", link=name, reason=str(error))
    if not links:
        raise ConfigError(f"transfer.links: none of {', '.join(names) or 'nothing'} could be opened")
    return links
