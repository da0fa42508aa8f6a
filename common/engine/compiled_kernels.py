"""Where the engine's compiled kernels are kept: in Cohort's cache folder.

Kernels know nothing of Cohort's folders and errors; this is where both are translated. Called before anything computes,
by `ModelRunner` and by measurements that use kernels without one.
"""

from __future__ import annotations

from cohort.common.errors import ConfigError
from cohort.common.paths import cache_dir
from cohort.kernels import native
from cohort.kernels.errors import KernelChoiceError


def keep_in_cache() -> None:
    """Names the cache folder to the kernels; builds nothing. Raises `ConfigError` for a wrong `COHORT_KERNELS`."""
    try:
        native.keep_in(cache_dir())
    except KernelChoiceError as error:
        raise ConfigError(str(error)) from error
