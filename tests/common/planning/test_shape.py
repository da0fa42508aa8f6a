from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.planning.shape import Bounds, Shape, neighbours, steps
from cohort.common.types import Role

kinds = st.tuples(st.sampled_from(list(Role)), st.sampled_from([1, 2]))
any_shape = st.dictionaries(kinds, st.integers(0, 4), max_size=4).map(Shape.of)
bounds = st.builds(
    Bounds,
    st.integers(1, 2),
    st.integers(2, 6),
    st.just(("colocated", "split")),
    st.sampled_from([(1,), (1, 2)]),
    st.sampled_from([0, 4, 8]),
)


def unified(count: int, degree: int = 1) -> Shape:
    return Shape.of({(Role.UNIFIED, degree): count})


@given(any_shape, bounds)
def test_neighbours_are_allowed_others_and_come_once(shape: Shape, within: Bounds) -> None:
    found = neighbours(shape, within)
    assert all(within.allows(each) and each != shape and each.serves for each in found)
    assert len(set(found)) == len(found)


@given(any_shape, any_shape)
def test_steps_lead_from_one_to_the_other(before: Shape, after: Shape) -> None:
    taken = steps(before, after)
    counts = before.counts
    for kind in taken.add:
        counts[kind] = counts.get(kind, 0) + 1
    for kind in taken.drain:
        counts[kind] -= 1
    assert Shape.of(counts) == after
    assert not set(taken.add) & set(taken.drain)


def test_neighbours_of_one_worker_and_of_a_pair() -> None:
    within = Bounds(1, 3)
    one = neighbours(unified(1), within)
    assert unified(2) in one and unified(3) in one
    pair = neighbours(unified(2), within)
    assert Shape.of({(Role.PREFILL, 1): 1, (Role.DECODE, 1): 1}) in pair and unified(1) in pair
    assert neighbours(unified(3), Bounds(3, 3, ("colocated",))) == []


def test_the_same_devices_in_larger_groups() -> None:
    found = neighbours(unified(2), Bounds(1, 4, degrees=(1, 2), max_devices=2))
    assert unified(1, 2) in found
    assert unified(2) in neighbours(unified(1, 2), Bounds(1, 4, degrees=(1, 2), max_devices=2))


def test_equal_counts_are_equal_shapes() -> None:
    assert Shape.of({(Role.DECODE, 1): 1, (Role.PREFILL, 1): 2}) == Shape.of(
        {(Role.PREFILL, 1): 2, (Role.DECODE, 1): 1}
    )
    assert str(unified(2, 4)) == "2 unified x 4"
