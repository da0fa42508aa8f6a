"""The gateway of the gateway's own tests: a live port over a memory bus, with a scripted cluster behind it."""

from tests.services.gateway.conftest import model_dir, open_site, real_model_dir, site, tokenizer

__all__ = ["model_dir", "open_site", "real_model_dir", "site", "tokenizer"]
