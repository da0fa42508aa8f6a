"""The configuration of a pipeline that is broken on purpose: all that it keeps is in a folder of its own.

Called by `command` before it starts one. Writes the tiny model where that one is wanted, and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cohort.common.paths import default_model_dir
from cohort.services.bench.chaos import tiny_model
from cohort.services.bench.chaos.catalogue import SERVED

TINY = "tiny"
_TINY_KV_BYTES = 16 << 20


def own_state(model: str, folder: Path, keys: list[str], resume_s: float, drain_s: float) -> dict[str, Any]:
    """As of a configuration file. `model`: a folder, `tiny` or `default`. The waits are short, so that what a client
    leaves behind soon ends."""
    state = folder / "state"
    state.mkdir(exist_ok=True)
    kv: dict[str, Any] = {}
    match model:
        case "tiny":
            path, kv = tiny_model.write(folder / "model"), {"memory_bytes": _TINY_KV_BYTES}
        case "default":
            path = default_model_dir()
        case _:
            path = Path(model)
    return {
        "model": {"path": str(path), "dtype": "float32", "served_name": SERVED},
        "kv": kv,
        "gateway": {
            "api_keys": keys,
            "resume_file": str(state / "streams.sqlite3"),
            "resume_s": resume_s,
            "write_timeout_s": 10.0,
            "body_timeout_s": 10.0,
            "drain_s": drain_s,
        },
        "keys": {"usage_file": str(state / "usage.sqlite3")},
        "batch": {"folder": str(state / "batches"), "concurrency": 4},
        "predictor": {"state_path": str(state / "lengths.npz"), "save_every_s": 10.0},
        "engine": {"state_dir": str(state / "learned"), "drain_s": drain_s},
    }
