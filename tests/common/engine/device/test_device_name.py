from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cohort.common.devices.cores import own_cores
from cohort.common.engine.device.device_name import device_name, ranges


@pytest.mark.parametrize(
    ("numbers", "text"), [({0}, "0"), ({0, 1, 2, 3}, "0-3"), ({5, 0, 2, 1}, "0-2,5"), ({1, 3, 5}, "1,3,5"), (set(), "")]
)
def test_core_numbers_are_written_as_ranges(numbers: set[int], text: str) -> None:
    assert ranges(numbers) == text


def test_the_same_cores_are_the_same_device_in_every_process_and_others_are_not() -> None:
    """The other does without torch, which takes seconds to import and has no part in this."""
    cpu = torch.device("cpu")
    program = (
        "import sys, types; torch = types.SimpleNamespace(type='cpu', float32=1, bfloat16=2, float16=3); "
        "sys.modules['torch'] = torch; "
        "from cohort.common.devices.cores import own_cores; "
        "from cohort.common.engine.device.device_name import device_name; "
        "print(device_name(torch, own_cores(), threads=999, instance='other'))"
    )
    elsewhere = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    here = device_name(cpu, own_cores(), threads=999, instance="this")
    assert elsewhere.stdout.strip() == here != device_name(cpu, {97, 98}, threads=2, instance="this")


def test_workers_with_fewer_threads_than_cores_share_nothing() -> None:
    cpu = torch.device("cpu")
    names = {device_name(cpu, {0, 1}, threads=threads, instance=name) for threads in (1, 2) for name in ("a", "b")}
    assert len(names) == 3  # both that have all cores are one device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_its_own_name_whatever_cores_its_workers_use() -> None:
    gpu = torch.device("cuda", 0)
    one, other = (device_name(gpu, {core}, threads=1, instance="w") for core in (0, 1))
    assert one == other != device_name(torch.device("cpu"), {0}, threads=1, instance="w")
