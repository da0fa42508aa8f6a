"""Arrays through one buffer: contents, types, growth while earlier ones are still read."""

from __future__ import annotations

import numpy as np
import torch

from cohort.common.engine.device.uploads import Uploads

CPU = torch.device("cpu")


def test_contents_and_types_survive() -> None:
    arrays = [
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.array([1.5], dtype=np.float32),
        np.array([True, False]),
        np.zeros((0, 4), dtype=np.int32),
        np.array([[7]], dtype=np.uint8),
        np.array([2.5, -1.0]),
    ]
    tensors = Uploads(CPU).put(arrays)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.from_numpy(array).dtype


def test_a_strided_array_arrives_in_order() -> None:
    array = np.arange(12).reshape(3, 4).T
    (tensor,) = Uploads(CPU).put([array])
    assert tensor.tolist() == array.tolist()


def test_growth_leaves_earlier_uploads() -> None:
    uploads = Uploads(CPU)
    (first,) = uploads.put([np.full(1000, 3)])
    (large,) = uploads.put([np.full(1 << 20, 5)])
    (after,) = uploads.put([np.full(10, 8)])
    assert first.tolist() == [3] * 1000
    assert bool((large == 5).all()) and after.tolist() == [8] * 10


def test_restart_begins_anew() -> None:
    uploads = Uploads(CPU)
    (first,) = uploads.put([np.full(4, 1)])
    uploads.restart()
    (second,) = uploads.put([np.full(4, 2)])
    assert second.data_ptr() == first.data_ptr() and second.tolist() == [2] * 4
