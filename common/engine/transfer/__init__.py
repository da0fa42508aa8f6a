"""KV blocks between workers: the transfer agent, its staging memory, check sums, what a link carries.

The room knows `device/` and `cache/`, and links through `common/transport/kv_link.py`; neither models nor steps.
"""
