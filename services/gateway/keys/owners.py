"""Bounds on the owner of one API key: its share of the queue, its own cached prefixes, its priority.

Made by `service.py`, used by `generator.py` for every request. An owner is the name that `middleware.py` puts on the
request (`OWNER`), never the key. With fewer than two keys nothing is shared out; a file of keys counts as several. Keys
are counted by their secrets, of which two names may have the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec

from cohort.common.config import Config
from cohort.common.errors import RequestError
from cohort.common.policies.baselines.bounded_admission import owner_requests
from cohort.common.types import Request


class Owners:
    """Stateless; `keys` as resolved."""

    def __init__(
        self, config: Config, keys: Sequence[str], weight_of: Callable[[str], float] = lambda owner: 1.0
    ) -> None:
        """`weight_of`: an owner's share of the cluster beside the others'."""
        gateway = config.gateway
        self.several = len(set(keys)) > 1 or bool(config.keys.file)
        """Whether there is more than one owner."""
        self.share = config.keys.owner_share if self.several else 1.0
        """Share that one owner may have of what all owners share."""
        self._salted = self.several and not config.kv.share_prefixes_between_keys
        self._weight_of = weight_of
        self._gateway = gateway
        self._clamps = bool(keys or config.keys.file)

    def queue_owner(self, owner: str) -> str:
        """Return the owner under which admission counts waiting requests; "" where nothing is shared out."""
        return owner if self.several else ""

    def priority(self, requested: int) -> int:
        """Return the priority that replaces a body's; lower is served first, 0 is the default. With keys it is never
        below 0: a request may let others pass, not pass them."""
        return max(0, requested) if self._clamps else requested

    def with_owner(self, requests: list[Request], owner: str, *, max_tokens_named: bool) -> list[Request]:
        """Add the owner's share and the salt of its prefixes. Raises a 400 `RequestError` for a request that could
        never wait within its share. `max_tokens_named`: as in `Offered`."""
        if not self.several:
            return requests
        self._check(requests, max_tokens_named=max_tokens_named)
        named, salted = _digest(owner, b"cohort owners"), _digest(owner, b"cohort prefixes") if self._salted else ""
        weight = self._weight_of(owner)
        return [
            msgspec.structs.replace(request, prefix_salt=salted, owner=named, weight=weight) for request in requests
        ]

    def _check(self, requests: list[Request], *, max_tokens_named: bool) -> None:
        """Check as admission counts. A single choice may exceed the share of tokens, as it may the whole bound."""
        gateway = self._gateway
        share = f"keys.owner_share {self.share:g} of gateway"
        most = owner_requests(gateway.own_waiting_requests, self.share)
        if len(requests) > most:
            raise RequestError(
                f"{len(requests)} choices in one request; at most {most} of one API key can wait "
                f"({share}.max_waiting_requests {gateway.own_waiting_requests}{gateway.of_all}).",
                param="n",
            )
        longest = float("inf") if max_tokens_named else gateway.default_prediction_tokens
        tokens = sum(r.prompt_tokens + min(longest, r.sampling.max_tokens) for r in requests)
        most = int(self.share * gateway.own_waiting_tokens)
        if len(requests) > 1 and tokens > most:
            raise RequestError(
                f"{len(requests)} choices ask for {tokens} tokens together, prompts included; at most {most} of one "
                f"API key can wait ({share}.max_waiting_tokens {gateway.own_waiting_tokens}{gateway.of_all}).",
                param="n",
            )


def _digest(owner: str, purpose: bytes) -> str:
    """Hash an owner for other processes, which need not know it."""
    return hashlib.blake2b(owner.encode(), digest_size=16, person=purpose).hexdigest()
