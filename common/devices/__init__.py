"""The GPUs of a host, for processes without torch and for workers: what is there, what is claimed, what fits.

    inventory ──▶ division (workers: auto) ──▶ launcher, workers
        │    └──▶ config.device_defaults
        └──▶ refusal (no silent CPU)          fit (weights against memory)          gpu_locks (one lock per share)

Nothing here imports torch or starts CUDA.
"""
