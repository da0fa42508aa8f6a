"""What keys and values are kept in: the model's dtype, or FP8.

Asked by the model runner, by workers that size their cache, and by the sums of what fits. A cache in FP8 has rows of
codes in E4M3, each with a scale of its own, which a GPU keeps apart from the codes (`kernels/fp8_cache.py`); its blocks
are copied and sent as any others.
Knows no tensor: hence no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from cohort.common.errors import ConfigError
from cohort.common.types import FP8_SCALE_BYTES

FP8 = "fp8"
FP8_PLANES = "fp8 in planes"
SCALE_BYTES: Mapping[str, int] = {FP8: FP8_SCALE_BYTES["cpu"], FP8_PLANES: FP8_SCALE_BYTES["cuda"]}
"""Of a row, by what `kv_dtype` answers; others have none."""


class CachedModel(Protocol):
    """What this module asks of a `ModelGeometry`."""

    @property
    def model_type(self) -> str: ...

    @property
    def latent(self) -> object | None: ...


def kv_dtype(cache_dtype: str, dtype: str, geometry: CachedModel, device_type: str) -> str:
    """What keys and values are kept in, as `kv_geometry` takes it: by `kv.cache_dtype`, in a model of `dtype`.

    FP8 is kept in rows on a processor, in planes on a GPU. Raises `ConfigError` where it is not served.
    """
    if cache_dtype == "auto":
        return dtype
    if geometry.latent is not None:
        raise ConfigError(
            f"kv.cache_dtype: {cache_dtype} is not served for {geometry.model_type}, whose cache has latents, which "
            "are key and value in one; leave it at auto"
        )
    return FP8 if device_type == "cpu" else FP8_PLANES
