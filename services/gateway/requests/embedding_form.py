"""How a model's hidden states become an embedding, as its files say: sentence-transformers' `modules.json` and the
configuration of its pooling.

Read by `model_card.py` at start. A decoder without these files is pooled by its last token, and not normalised. Steps
that are not computed here (a dense layer behind the pooling, say) leave the model without embeddings, and a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cohort.common.errors import ModelError
from cohort.common.json_files import read_json_object
from cohort.common.types import Pooling

_OWN_STEPS = ("Transformer", "Pooling", "Normalize")
_POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean"}


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    """`width`: numbers of a whole embedding. `refused`: the reason why there are none; "" = there are."""

    width: int
    pooling: Pooling = "last"
    normalised: bool = False
    refused: str = ""


NO_EMBEDDINGS = EmbeddingForm(0, refused="its config.json names no hidden_size")


class _Module(msgspec.Struct):
    type: str
    path: str = ""


def read_embedding_form(folder: Path, hidden_size: int) -> EmbeddingForm:
    """Read the form. What is wrong with the files is in `refused`: the model answers all else."""
    file = folder / "modules.json"
    if not file.is_file():
        return EmbeddingForm(hidden_size)
    try:
        modules = msgspec.json.decode(file.read_bytes(), type=list[_Module])
        steps = {module.type.rpartition(".")[2]: folder / module.path for module in modules}
        if strange := [step for step in steps if step not in _OWN_STEPS]:
            return EmbeddingForm(
                hidden_size, refused=f"modules.json names a step that is not served: {strange[0][:60]}"
            )
        pooling: Pooling = "last"
        if "Pooling" in steps:
            pooling = _pooling(read_json_object(steps["Pooling"] / "config.json"))
    except (OSError, msgspec.DecodeError, ModelError, ValueError) as error:
        return EmbeddingForm(hidden_size, refused=f"its pooling cannot be read: {error}")
    return EmbeddingForm(hidden_size, pooling, "Normalize" in steps)


def _pooling(settings: dict[str, Any]) -> Pooling:
    """Return the pooling of a `1_Pooling/config.json`, which has it as a word or as switches. Raises `ValueError`."""
    named = settings.get("pooling_mode")
    chosen = [named] if isinstance(named, str) else []
    chosen += [
        name.removeprefix("pooling_mode_").removesuffix("_tokens")
        for name, on in settings.items()
        if name.startswith("pooling_mode_") and on is True
    ]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise ValueError(f"pooling by {', '.join(map(str, chosen)) or 'nothing'}, but by the mean or last token it is")
    return _POOLINGS[chosen[0]]
