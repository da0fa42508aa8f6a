"""The gateway of the gateway's own tests: a live port over a memory bus, with a scripted cluster behind it."""

from __future__ import annotations

from tests.services.gateway.conftest import Site, model_dir, open_site, real_model_dir, site, tokenizer

__all__ = ["counted", "model_dir", "open_site", "real_model_dir", "site", "tokenizer"]


def counted(site: Site, name: str) -> float:
    """What a counter of the gateway says."""
    samples = (sample for family in site.context.registry.collect() for sample in family.samples)
    return next(sample.value for sample in samples if sample.name == name)
