"""Opens the KV links a configuration asks for, best first.

Called by a worker at start. A link that cannot be opened is skipped with one warning; none at all is an error. With a
CURVE key a link that does not encrypt is left out unless the operator allows it. Decides nothing later: which link a
transfer takes is the transfer agent's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from cohort.common.errors import ConfigError, TransferError
from cohort.common.transport.kv_link import KvLink
from cohort.common.transport.security import CurveKeys
from cohort.common.transport.ucx_devices import UcxChoice

log = structlog.get_logger(__name__)

PLAIN = frozenset({"ucx"})
"""Links that neither encrypt their data nor ask for its sender."""


def open_links(
    names: Sequence[str],
    *,
    zmq_bind: str,
    zmq_advertise: str = "",
    curve: CurveKeys | None = None,
    plain_allowed: bool = False,
    one_machine: bool = False,
    ucx: UcxChoice | None = None,
) -> list[KvLink]:
    """Open the links of `names` (`transfer.links`), on the event loop that will use them. `plain_allowed`: also with
    `curve`, open links that do not encrypt. `one_machine`: all peers are on this host, so loopback is the only network
    interface to listen on. `ucx`: what UCX may use; `ConfigError` where that is not here, as another link is not what
    the operator asked for."""
    links: list[KvLink] = []
    for name in names:
        if name in PLAIN and curve is not None and not plain_allowed:
            log.info("KV link left out: it does not encrypt", link=name, option="transfer.plain_links_allowed")
            continue
        try:
            match name:
                case "ucx":
                    from cohort.common.transport.ucx_link import UcxLink

                    opened = UcxLink(ucx, loopback_only=one_machine)
                    links.append(opened)
                    log.info("UCX opened", may_use=opened.may_use)
                case "zmq":
                    from cohort.common.transport.zmq_link import ZmqLink

                    links.append(ZmqLink(zmq_bind, curve, advertise=zmq_advertise))
                case _:
                    raise ConfigError(f"transfer.links: no link named {name!r}; there are: ucx, zmq")
        except TransferError as error:
            log.warning("KV link not available, using the next", link=name, reason=str(error))
    if not links and curve is not None and not plain_allowed and PLAIN.issuperset(names):
        raise ConfigError(
            f"transfer.links: {', '.join(names) or 'nothing'} does not encrypt and security.curve_secret_key_file is "
            "set; add zmq, or set transfer.plain_links_allowed=true"
        )
    if not links:
        raise ConfigError(f"transfer.links: none of {', '.join(names) or 'nothing'} could be opened")
    return links
