"""A step on the device: one forward and its sampling, eager or as a recorded graph.

The room knows `models/` and everything below; it neither loads a model nor drafts.
"""
