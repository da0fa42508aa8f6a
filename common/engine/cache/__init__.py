"""The KV cache's tensors, and copies of blocks between device and host memory.

The room knows `device/`; which block belongs to whom is the business of `common/kv/`.
"""
