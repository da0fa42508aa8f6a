"""The choice between the extension and the reference."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import structlog
import torch

from cohort.common.engine.device import compiled_kernels
from cohort.common.errors import ConfigError
from cohort.common.paths import cache_dir
from cohort.kernels.cpu import native
from cohort.kernels.cpu.build import find_compiler, library_path
from cohort.kernels.cpu.self_check import first_difference
from cohort.kernels.errors import KernelBuildError, KernelChoiceError


def test_the_environment_forces_the_reference(monkeypatch):
    monkeypatch.setenv("COHORT_KERNELS", "reference")
    assert native.load() is None


def test_an_unknown_choice_is_named(monkeypatch):
    monkeypatch.setenv("COHORT_KERNELS", "fast")
    with pytest.raises(KernelChoiceError, match=r"COHORT_KERNELS='fast': must be 'auto' or 'reference'"):
        native.load()


def test_to_the_engine_a_wrong_choice_is_a_wrong_option(monkeypatch):
    monkeypatch.setenv("COHORT_KERNELS", "fast")
    with pytest.raises(ConfigError, match="COHORT_KERNELS='fast'"):
        compiled_kernels.keep_in_cache()


def test_without_a_folder_for_them_no_kernels_are_built(monkeypatch):
    monkeypatch.delenv("COHORT_KERNELS", raising=False)
    monkeypatch.setattr(native, "_cache", None)
    with pytest.raises(KernelChoiceError, match="keep_in"):
        native.load()


def test_a_failed_build_is_one_warning(monkeypatch):
    def fail(cache) -> None:
        raise KernelBuildError("no C++ compiler found")

    monkeypatch.delenv("COHORT_KERNELS", raising=False)
    monkeypatch.setattr(native, "build", fail)
    monkeypatch.setattr(native, "_decided", False)
    monkeypatch.setattr(native, "_operators", None)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            assert native.ops_for(torch.ones(1)) is None
    assert [(entry["log_level"], entry["implementation"]) for entry in logs] == [("warning", "reference")]
    assert native.implementation() == "reference"


def test_a_file_that_is_no_library_is_one_warning(monkeypatch, tmp_path):
    path = tmp_path / "cohort_kernels.so"
    path.write_bytes(b"half a file")
    monkeypatch.delenv("COHORT_KERNELS", raising=False)
    monkeypatch.setattr(native, "build", lambda cache: path)
    with structlog.testing.capture_logs() as logs:
        assert native.load() is None
    assert [entry["log_level"] for entry in logs] == ["warning"]


def test_other_dtypes_go_to_the_reference():
    for dtype in (torch.float16, torch.float64):
        assert native.ops_for(torch.ones(1, dtype=dtype)) is None


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
class TestWithTheExtension:
    def test_it_is_the_implementation_in_use(self):
        assert native.implementation() == "native"
        assert library_path(cache_dir()).exists()

    def test_the_self_check_finds_a_wrong_kernel(self):
        operators = native.ops_for(torch.ones(1))
        assert first_difference(operators) is None

        class Wrong:
            def __getattr__(self, name):
                return getattr(operators, name)

            def silu_mul(self, gate_up, out):
                operators.silu_mul(gate_up, out)
                out[1, 2] += 0.1

        assert first_difference(Wrong()) == "elementwise steps in torch.float32"

        class NotANumber(Wrong):
            def paged_attention(self, *arguments):
                operators.paged_attention(*arguments)
                arguments[8][0, 0, 0] = float("nan")

        assert first_difference(NotANumber()) == "attention in torch.float32"

    def test_a_cached_library_loads_without_the_build_tools(self):
        """Loading must be quick: nothing of torch's extension builder, and no compiler, may be touched."""
        native.implementation()
        program = (
            "import sys; from cohort.common.engine.device import compiled_kernels; compiled_kernels.keep_in_cache(); "
            "from cohort.kernels.cpu import native; assert native.implementation() == 'native'; "
            "assert 'torch.utils.cpp_extension' not in sys.modules"
        )
        environment = {**os.environ, "CXX": "/nonexistent", "PATH": ""}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
