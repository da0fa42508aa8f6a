"""Where the engine's compiled kernels are kept, in Cohort's cache folder, and how many were compiled.

Kernels know nothing of Cohort's folders and errors; this is where both are translated. Called before anything computes,
by `ModelRunner` and by measurements that use kernels without one.
"""

from __future__ import annotations

import os
import sys

from cohort.common.errors import ConfigError
from cohort.common.paths import cache_dir
from cohort.kernels import native
from cohort.kernels.errors import KernelChoiceError


def keep_in_cache() -> None:
    """Names the cache folder to the kernels; builds nothing. Raises `ConfigError` for a wrong `COHORT_KERNELS`.

    Triton's kernels go there too, unless `TRITON_CACHE_DIR` says otherwise: a worker that starts again, or beside
    others, then compiles none of them. It must be called before anything imports Triton.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_dir() / "triton"))
    try:
        native.keep_in(cache_dir())
    except KernelChoiceError as error:
        raise ConfigError(str(error)) from error


def compilations() -> int:
    """Variants of GPU kernels that this process has compiled, or read from the cache folder, since it loaded Triton. A
    launch waited for each; after warming up there should be none."""
    variants = sys.modules.get("cohort.kernels.gpu.variants")
    return 0 if variants is None else int(variants.compilations.count)
