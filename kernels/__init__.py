"""Kernels over the paged KV cache and the fused elementwise steps of a transformer layer.

`reference` defines what every kernel computes; the C++ extension (`csrc/`, `build`, `native`) computes the same faster.
Callers use `paged_attention`, `slots` and `fused` and never learn which of the two ran.
"""
