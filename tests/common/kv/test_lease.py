"""Leases: renewed they live, forgotten they expire exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.errors import InvariantViolated, LeaseExpired
from cohort.common.kv.lease import LeaseTable
from cohort.common.types import Attempt


def test_a_lease_lives_as_long_as_it_is_renewed() -> None:
    table = LeaseTable(2.0)
    table.grant(0.0, 1, Attempt("a", 1), "prefill-0")
    assert table.renew(1.5, 1)
    assert table.expire(3.4) == []
    assert [lease.lease_id for lease in table.expire(3.5)] == [1]
    assert table.expire(9.0) == []
    assert not table.renew(9.0, 1)
    with pytest.raises(LeaseExpired):
        table.get(1)
    assert (table.granted, table.expired, len(table)) == (1, 1, 0)


def test_a_lease_is_granted_once() -> None:
    table = LeaseTable(1.0)
    table.grant(0.0, 7, Attempt("a", 1), "p")
    with pytest.raises(InvariantViolated):
        table.grant(0.0, 7, Attempt("b", 1), "p")


@given(
    st.lists(
        st.tuples(st.sampled_from(["grant", "renew", "end", "expire"]), st.integers(0, 5), st.floats(0, 3)), max_size=60
    )
)
def test_against_a_dictionary_of_deadlines(history: list[tuple[str, int, float]]) -> None:
    table, model, now_s = LeaseTable(2.0), {}, 0.0
    for what, lease_id, step_s in history:
        now_s += step_s
        if what == "grant" and lease_id not in model:
            table.grant(now_s, lease_id, "k", "p")
            model[lease_id] = now_s + 2.0
        elif what == "renew":
            assert table.renew(now_s, lease_id) == (lease_id in model)
            if lease_id in model:
                model[lease_id] = max(model[lease_id], now_s + 2.0)
        elif what == "end":
            table.end(lease_id)
            model.pop(lease_id, None)
        elif what == "expire":
            late = {key for key, deadline in model.items() if deadline <= now_s}
            assert {lease.lease_id for lease in table.expire(now_s)} == late
            model = {key: deadline for key, deadline in model.items() if key not in late}
        assert len(table) == len(model)
