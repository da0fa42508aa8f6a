"""What keys and values are kept in: the model's dtype, or FP8.

Asked by the model runner, by workers that size their cache, and by the sums of what fits. A cache in FP8 has rows of
codes in E4M3, each with a scale of its own (`kernels/fp8_cache.py`); its blocks are copied and sent as any others.
Knows no tensor: hence no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cohort.common.errors import ConfigError

if TYPE_CHECKING:
    from cohort.common.engine.model_config import ModelGeometry

FP8 = "fp8"


def kv_dtype(cache_dtype: str, dtype: str, geometry: ModelGeometry, device_type: str) -> str:
    """What keys and values are kept in, as `kv_geometry` takes it: by `kv.cache_dtype`, in a model of `dtype`.

    Raises `ConfigError` where FP8 is not served, by the form or the device.
    """
    if cache_dtype == "auto":
        return dtype
    if device_type != "cpu":
        raise ConfigError(
            f"kv.cache_dtype: {cache_dtype} is served on processors, and this worker's device is {device_type}; "
            "no GPU kernel reads such a cache: leave it at auto"
        )
    if geometry.latent is not None:
        raise ConfigError(
            f"kv.cache_dtype: {cache_dtype} is not served for {geometry.model_type}, whose cache has latents, which "
            "are key and value in one; leave it at auto"
        )
    return FP8
