"""A model that is loaded and runs: `ModelRunner`, its adapters, and the models that draft for it.

The room knows `forward/`, `drafts/` and everything below; nothing of machines or messages.
"""
