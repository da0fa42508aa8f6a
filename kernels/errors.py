"""Exceptions of the kernels. They know nothing of Cohort's own errors; the engine translates."""

from __future__ import annotations


class KernelError(Exception):
    """Base of all errors of the kernels."""


class KernelBuildError(KernelError):
    """The extension could not be built; the message carries the compiler's last lines."""


class KernelChoiceError(KernelError):
    """`COHORT_KERNELS` names no implementation, or the folder of built kernels is unknown."""
