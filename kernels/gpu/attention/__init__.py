"""Attention in Triton: paged decode, prompts, latents, and the form that is the same in every batch.

The room knows the GPU's plan and workspace; neither products nor sampling.
"""
