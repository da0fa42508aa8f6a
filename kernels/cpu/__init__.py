"""The C++ kernels from Python: built, loaded, checked against the reference, weights packed into panels.

The room knows the shared types and the reference; neither `ops/` nor `gpu/`.
"""
