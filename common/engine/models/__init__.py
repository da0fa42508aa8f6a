"""The forward passes: lean modules for the known families, transformers' code over the paged cache for all others.

The room knows `config/`, `weights/`, `step/` and `ranks/`; nothing of workers or schedules.
"""
