"""What penalties look back on: looking ahead over drafts changes nothing of it."""

from __future__ import annotations

from cohort.common.sampling_inputs import TokenHistory


def said(history: TokenHistory, ahead: tuple[int, ...] = ()) -> dict[int, int]:
    ids, counts = history.output_counts_with(ahead)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def test_drafts_count_for_the_positions_behind_them_alone():
    history = TokenHistory([1, 2], [3, 3, 4])
    assert said(history, (3, 5, 5)) == {3: 3, 4: 1, 5: 2}
    assert said(history, (3,)) == {3: 3, 4: 1}
    assert said(history) == {3: 2, 4: 1}, "the drafts were wrong"
    assert set(history.seen_with((5, 1)).tolist()) == {1, 2, 3, 4, 5}
    assert set(history.seen.tolist()) == {1, 2, 3, 4}
    history.extend([3, 5])
    assert said(history) == {3: 3, 4: 1, 5: 1}
