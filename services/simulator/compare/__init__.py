"""`cohort compare`: systems times loads times seeds from one file, as tables.

The room knows `core/` and `hardware/`.
"""
