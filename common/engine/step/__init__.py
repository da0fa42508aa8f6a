"""One step's batch and what is made of its results: rows, sampling, grammars, drafts checked, classes of batch sizes.

The room knows `device/`; neither models nor ranks.
"""
