"""Kernels over the paged KV cache and the fused elementwise steps of a transformer layer.

`reference` defines what every kernel computes; `cpu/` (C++, `csrc/`) and `gpu/` (Triton) compute the same faster.
Callers use `ops/` and never learn which of them ran.
"""
