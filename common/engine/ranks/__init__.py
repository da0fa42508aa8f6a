"""A worker of several ranks: their processes, their messages, and each one's part of the model and of the KV.

The room knows `config/`, `cache/`, `weights/`, `step/` and `transfer/`; no model.
"""
