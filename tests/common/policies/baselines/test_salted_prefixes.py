"""Cached prefixes are found by requests of the same salt alone: no key learns what another one asks."""

from __future__ import annotations

import msgspec
import pytest

from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.sequence import Sequence
from cohort.common.types import KvGeometry
from tests.common.policies.baselines.drive import sequence

BLOCK, PROMPT = 4, 13
SALTS = ("", "one", "other")


def salted(name: str, salt: str) -> Sequence:
    """All of them have the same prompt."""
    tokens = list(range(PROMPT))
    request = msgspec.structs.replace(sequence(name, PROMPT).request, tokens=tokens, prefix_salt=salt)
    return Sequence(request, list(tokens), None, 0, 0.0)


@pytest.mark.parametrize("salt", SALTS)
def test_what_one_request_computed_only_those_of_its_salt_find(salt: str):
    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, BLOCK), 64, 0)
    first = salted("first", salt)
    assert kv.admit(first) == 0
    first.computed = PROMPT
    kv.committed(first)
    kv.release(first.key)
    assert kv.cached_blocks == 3
    found = {other: kv.admit(salted(f"of {other}", other)) for other in SALTS}
    assert found == {other: 12 if other == salt else 0 for other in SALTS}
    arriving = {
        other: kv.reserve(salted(f"to {other}", other).key, first.tokens, PROMPT, salt=other) for other in SALTS
    }
    assert arriving == found
    kv.check()
