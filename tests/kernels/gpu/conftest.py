"""Where the Triton kernels run in these tests: on the GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

try:
    from triton import knobs, language
    from triton.runtime import interpreter
except ImportError:  # the development set-up installs it, where there is one for the system
    collect_ignore_glob = ["test_*.py"]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REAL = DEVICE.type == "cuda" and "COHORT_TINY_SHAPES" not in os.environ
"""Tests of the shapes that are served take those; elsewhere, and for tools that slow every access down, tiny ones."""


@pytest.fixture(autouse=True, scope="session")
def interpreted_without_a_gpu() -> Iterator[None]:
    """`tests/conftest.py` asks for the interpreter before anything can import Triton."""
    if DEVICE.type == "cuda":
        yield
        return
    if not knobs.runtime.interpret:
        pytest.fail("there is no GPU, and Triton was not told to interpret (TRITON_INTERPRET=1)")
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    convert = interpreter._convert_float
    patched: set[str] = set()

    def patch_for_numpy(tensor: Any, scope: Any) -> None:
        """Triton 3.6 takes arrays of one element for loop bounds, which NumPy refuses since 2.4."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def patch_once(function: Any) -> Any:
        """Triton does it again for every call of every function, which takes a third of the time."""
        modules = {value.__name__ for value in function.__globals__.values() if value in (language, language.core)}
        if not modules <= patched:
            patch_language(function)
            patched.update(modules)
        return interpreter._LangPatchScope()  # with nothing to restore

    def converted(values: Any, source: Any, target: Any, mode: Any) -> Any:
        """Triton cuts bfloat16 off where a GPU rounds, and its E4M3 has no NaN."""
        if (source, target) == (language.float8e4nv, language.float16):
            codes = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8))
            return codes.view(torch.float8_e4m3fn).half().numpy().view(np.uint16)
        if (source, target) != (language.float32, language.bfloat16):
            return convert(values, source, target, mode)
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(interpreter, "_convert_float", converted)
        patching.setattr(interpreter, "_patch_lang_tensor", patch_for_numpy)
        patching.setattr(interpreter, "_patch_lang", patch_once)
        yield


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def make_gpu_step(make_step: Callable[..., Any]) -> Callable[..., Any]:
    """`make_step` with what a kernel reads on the device; the dense keys and values stay."""

    def make(*args: Any, **options: Any) -> Any:
        step = make_step(*args, **options)
        step.query, step.kv = step.query.to(DEVICE), step.kv.to(DEVICE)
        meta = step.meta
        for name in ("query_start", "context_lens", "block_tables", "directions"):
            if (tensor := getattr(meta, name)) is not None:
                setattr(meta, name, tensor.to(DEVICE))
        step.meta = meta.as_signed()
        return step

    return make
