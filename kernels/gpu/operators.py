"""Every kernel in Triton under the name its dispatching module calls it by. Importing this loads Triton."""

from cohort.kernels.gpu.attention.attention import paged_attention
from cohort.kernels.gpu.attention.latents import latent_attention
from cohort.kernels.gpu.elementwise import (
    clamped_swiglu,
    gelu_mul,
    rms_norm,
    rope_and_write_kv,
    rope_inplace,
    silu_mul,
    soft_cap,
    write_kv,
)
from cohort.kernels.gpu.products.coded import coded_product
from cohort.kernels.gpu.products.experts import add_weighted, expert_outputs
from cohort.kernels.gpu.products.fixed_products import fixed_product
from cohort.kernels.gpu.sampling.sampling import sample_rows
from cohort.kernels.gpu.slots import gather_slots, scatter_slots

__all__ = [
    "add_weighted",
    "clamped_swiglu",
    "coded_product",
    "expert_outputs",
    "fixed_product",
    "gather_slots",
    "gelu_mul",
    "latent_attention",
    "paged_attention",
    "rms_norm",
    "rope_and_write_kv",
    "rope_inplace",
    "sample_rows",
    "scatter_slots",
    "silu_mul",
    "soft_cap",
    "write_kv",
]
