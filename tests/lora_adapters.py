"""Random LoRA adapters in PEFT's format, and the base model with one merged into its weights: the tests' reference.

The merge is the definition, W + scale · B A, on transformers' own module; it shares no code with what it judges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    base: Path,
    folder: Path,
    *,
    seed: int,
    targets: Sequence[str] = ALL,
    rank: int = 4,
    alpha: float = 8,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    layers: Sequence[int] | None = None,
    strength: float = 1.0,
    **settings: Any,
) -> Path:
    """An adapter of the model in `base`. `layers`: only of these; `ranks`, `alphas`: by module, as PEFT's patterns."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name.rpartition(".")[2] not in targets:
            continue
        if layers is not None and not any(f"layers.{layer}." in name for layer in layers):
            continue
        own = (ranks or {}).get(name.rpartition(".")[2], rank)
        outputs, inputs = module.weight.shape
        for half, shape, scale in (("A", (own, inputs), inputs**-0.5), ("B", (outputs, own), strength * own**-0.5)):
            values = torch.randn(shape, generator=generator) * scale
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": list(targets),
        "rank_pattern": dict(ranks or {}),
        "alpha_pattern": dict(alphas or {}),
        "layers_to_transform": None if layers is None else list(layers),
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def save_merged(base: Path, adapter: Path, folder: Path) -> Path:
    """The base model with the adapter's product added to its weights."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    with torch.no_grad():
        for key, a in tensors.items():
            if (match := re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", key)) is None:
                continue
            name = match[1]
            own = name.rpartition(".")[2]
            rank = config["rank_pattern"].get(own, config["r"])
            alpha = config["alpha_pattern"].get(own, config["lora_alpha"])
            scale = alpha / rank**0.5 if config["use_rslora"] else alpha / rank
            modules[name].weight += scale * (tensors[key.replace("lora_A", "lora_B")] @ a)
    model.save_pretrained(folder)
    return folder
