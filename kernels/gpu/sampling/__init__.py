"""Sampling by the batch in Triton: penalties, thresholds by search, the draw.

The room knows the types of `kernels/ops/sampling.py` and nothing else.
"""
