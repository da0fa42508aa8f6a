"""A worker of several ranks: who they are, what each is told, which part of the model and of the KV is whose.

The room knows `config/`, `cache/`, `weights/`, `step/` and `transfer/`; no model.
"""
