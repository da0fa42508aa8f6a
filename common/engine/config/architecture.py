"""Whether anything here computes a model's architecture, before torch or weights are read.

Called by the launcher, `cohort doctor` and, for containers, by each worker.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cohort.common.engine.config.model_config import GEMMA_SHAPED, LLAMA_SHAPED, MIXTURES
from cohort.common.errors import ModelError
from cohort.common.json_files import read_json_object

_OWN = LLAMA_SHAPED | MIXTURES | GEMMA_SHAPED | {"gemma3", "gpt_oss", "deepseek_v2", "deepseek_v3", "opt"}
_MODELS = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def check_architecture(folder: Path) -> None:
    """Raise `ModelError` for a type of model that neither a form of this project nor transformers computes;
    `read_geometry` says what else is wrong with a configuration."""
    try:
        config = read_json_object(folder / "config.json")
    except FileNotFoundError:
        return
    kind = config.get("model_type")
    if not isinstance(kind, str) or config.get("is_encoder_decoder") or kind in _OWN:
        return
    known = _causal_models()
    if kind in known or not known:
        return
    raise ModelError(
        f"{folder / 'config.json'}: no code here computes models of type {kind}: neither this project's nor that of "
        f"transformers {version('transformers')}; serve another model, or one of the families in docs/models.md"
    )


@cache
def _causal_models() -> frozenset[str]:
    """Return the types that transformers' `AutoModelForCausalLM` knows, read from its source in a tenth of a second:
    importing it takes seconds and loads torch. Empty where that does not tell."""
    try:
        version("transformers")
        spec = importlib.util.find_spec("transformers")
        roots = spec.submodule_search_locations if spec is not None else None
        source = Path(next(iter(roots or ())), "models", "auto", "modeling_auto.py").read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (ImportError, PackageNotFoundError, OSError, StopIteration, SyntaxError, ValueError):
        return frozenset()
    tables = (node.value for node in tree.body if isinstance(node, ast.Assign) and _names(node.targets[0], _MODELS))
    pairs = (
        pair for table in tables for pair in ast.walk(table) if isinstance(pair, ast.Tuple) and len(pair.elts) == 2
    )
    first = (pair.elts[0] for pair in pairs)
    return frozenset(each.value for each in first if isinstance(each, ast.Constant) and isinstance(each.value, str))


def _names(target: ast.expr, name: str) -> bool:
    return isinstance(target, ast.Name) and target.id == name
