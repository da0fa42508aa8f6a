"""Where Cohort keeps what it makes outside the repository: the converted model, built kernels, run files."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = "model.gguf"
"""Name of the GGUF file, or of a link to it, in a model folder that was made around one."""


def cache_dir() -> Path:
    """Return `$COHORT_CACHE_DIR`, else `$XDG_CACHE_HOME/cohort`, else `~/.cache/cohort`."""
    if override := os.environ.get("COHORT_CACHE_DIR"):
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cohort"


def state_dir(folder: str) -> Path:
    """Return what the option `state.folder` names, else the cache folder."""
    return Path(folder).expanduser() if folder else cache_dir()


def default_model_dir() -> Path:
    """Return the folder of the default model in Hugging Face format; made by the set-up."""
    return cache_dir() / "models" / DEFAULT_MODEL_NAME


def run_dir(port: int) -> Path:
    """Return the folder for sockets, pids and logs of the pipeline whose gateway listens on `port`. It is short: a Unix
    socket's path may have 107 bytes."""
    return cache_dir() / "run" / str(port)
