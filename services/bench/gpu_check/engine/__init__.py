"""Sections that run the engine: steps, prompts, gaps, drafts, answers, transfers, the pipeline.

The room knows `frame/` and `kernels/`.
"""
