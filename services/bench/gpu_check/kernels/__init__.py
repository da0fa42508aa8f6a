"""Sections that look at kernels alone: equality with the reference, rates, the sanitizer, the smoke test.

The room knows `frame/`.
"""
