"""What was learned survives on disk; what cannot be read is set aside, never trusted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cohort.services.length_predictor import features, state
from cohort.services.length_predictor.buffer import Dataset, ObservationBuffer
from cohort.services.length_predictor.training import train

if TYPE_CHECKING:
    from .conftest import World


def test_round_trip(world: World, tmp_path: Path) -> None:
    data = world.dataset(40)
    model = train(data, version=7)
    path = tmp_path / "deep" / "state.npz"
    state.save(path, state.State(data, model))
    loaded = state.load(path)
    assert loaded is not None and loaded.model is not None
    for name, array in data.to_arrays().items():
        assert np.array_equal(loaded.data.to_arrays()[name], array), name
    vector = world.observation().vector
    assert loaded.model.predict_log(vector).tolist() == model.predict_log(vector).tolist()
    assert (loaded.model.version, loaded.model.trained_on) == (7, 40)
    assert [p.name for p in path.parent.iterdir()] == ["state.npz"]


def test_buffer_restores_its_rows_and_stays_bounded(world: World) -> None:
    data = world.dataset(30)
    buffer = ObservationBuffer(20)
    buffer.restore(data)
    restored = buffer.dataset()
    assert len(restored) == 20
    assert restored.output_tokens.tolist() == data.output_tokens[10:].tolist()
    assert np.array_equal(restored.compact, data.compact[10:])
    assert restored.buckets.tolist() == data.buckets[data.offsets[10] :].tolist()


def test_no_rows_and_no_model_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    state.save(path, state.State(ObservationBuffer(5).dataset(), None))
    loaded = state.load(path)
    assert loaded is not None and len(loaded.data) == 0 and loaded.model is None


def test_no_file_is_no_state(tmp_path: Path) -> None:
    assert state.load(tmp_path / "none.npz") is None


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "flipped"])
def test_damaged_file_is_set_aside(world: World, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.npz"
    state.save(path, state.State(world.dataset(40), None))
    whole = path.read_bytes()
    path.write_bytes(
        {
            "truncated": whole[: len(whole) // 2],
            "garbage": b"not an archive" * 50,
            "empty": b"",
            "flipped": whole[:300] + bytes(b ^ 0xFF for b in whole[300:340]) + whole[340:],
        }[damage]
    )
    with pytest.raises(state.StateUnreadable, match=r"state\.npz"):
        state.load(path)
    assert not path.exists()
    assert (tmp_path / "state.npz.unreadable").exists()
    assert state.load(path) is None


def test_state_of_other_features_is_not_read(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.npz"
    state.save(path, state.State(world.dataset(5), None))
    monkeypatch.setattr(state, "layout", lambda: features.layout() + ";one more")
    with pytest.raises(state.StateUnreadable, match="other features"):
        state.load(path)


def test_a_file_with_objects_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    np.savez(path, format=np.asarray([object()], dtype=object))
    with pytest.raises(state.StateUnreadable):
        state.load(path)


def test_inconsistent_arrays_are_refused(world: World) -> None:
    arrays = world.dataset(10).to_arrays()
    arrays["data_offsets"] = arrays["data_offsets"][:-1]
    with pytest.raises(ValueError, match="n-gram rows"):
        Dataset.from_arrays(arrays)
