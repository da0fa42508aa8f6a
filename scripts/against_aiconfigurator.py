"""Our times of iterations beside those of NVIDIA's aiconfigurator: six models, decodes and prompts of three batches.

    python3 -m venv venv && venv/bin/pip install aiconfigurator==0.12.0
    python scripts/against_aiconfigurator.py venv/bin/python [--limit 25]

aiconfigurator (Apache-2.0) adds up operators that it measured under vLLM, on a device alone, without the host; so does
this script with the simulator's devices. It runs in an interpreter of its own, to which models go as `config.json`.
Prints a Markdown table of milliseconds and marks what differs by more than the limit. Exit status 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cohort.common.policies.cost_model import CostModel, ModelShape, StackShape, StepWork, prefill_pairs
from cohort.services.bench.output import markdown_table
from cohort.services.simulator.hardware.hardware import load_device, load_model

DEVICES = {"a100-80": ("a100_sxm", "0.14.0"), "h100-80": ("h100_sxm", "0.24.0"), "l40s": ("l40s", "0.24.0")}
"""Device of ours, and aiconfigurator's name and version of vLLM."""
MODELS = {"llama-2-7b": 1, "llama-3-8b": 1, "qwen2.5-14b": 1, "qwen2.5-32b": 2, "llama-3-70b": 4, "qwen3-30b-a3b": 1}
"""Devices of an instance by model."""
BATCHES = (1, 16, 64)
PROMPTS = (512, 2048, 8192)
CONTEXT = 1024
"""Positions that every decode row reads; prompts of 2,048 tokens at most fill the others."""

_THEIRS = """
import json, logging, sys
logging.disable(logging.WARNING)
from aiconfigurator.sdk.backends.factory import get_backend
from aiconfigurator.sdk.inference_session import InferenceSession
from aiconfigurator_core.sdk import config, models, perf_database
found = []
for cell in json.load(sys.stdin):
    database = perf_database.get_database(cell["system"], "vllm", cell["version"])
    degree, mode = cell["degree"], cell["mode"]
    shape = config.ModelConfig(tp_size=degree, moe_tp_size=degree, moe_ep_size=1)
    session = InferenceSession(models.get_model(cell["path"], shape, "vllm"), database, get_backend("vllm"))
    work = config.RuntimeConfig(batch_size=cell["rows"], isl=cell["tokens"], osl=2 if mode == "static_gen" else 1)
    found.append(session.run_static_latency_only(work, cell["mode"]))
json.dump(found, sys.stdout)
"""


def configuration(model: ModelShape) -> dict[str, Any]:
    """Return a model's `config.json`."""
    found: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.max_positions,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": model.tied_embeddings,
    }
    if model.experts:
        found |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.expert_intermediate,
        }
    return found


def cells(folder: Path) -> list[dict[str, Any]]:
    found = []
    for device, (system, version) in DEVICES.items():
        for name, degree in MODELS.items():
            path = folder / name
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text(json.dumps(configuration(load_model(name))))
            where = {"device": device, "system": system, "version": version, "model": name, "degree": degree}
            where["path"] = str(path)
            found += [where | {"mode": "static_gen", "rows": rows, "tokens": CONTEXT} for rows in BATCHES]
            for tokens in PROMPTS:
                each = min(tokens, 2048)
                found.append(where | {"mode": "static_ctx", "rows": tokens // each, "tokens": each})
    return found


def ours_ms(cell: dict[str, Any]) -> float:
    cost = CostModel(
        load_model(cell["model"]),
        load_device(cell["device"])[0],
        StackShape("none", 0.0, 0.0, 0.0),
        tensor_parallel=cell["degree"],
    )
    rows, tokens = cell["rows"], cell["tokens"]
    if cell["mode"] == "static_gen":
        work = StepWork(rows, rows, rows, 0, 0, rows, rows * tokens, tokens)
    else:
        work = StepWork(rows * tokens, rows, rows, rows * prefill_pairs(0, tokens), rows * tokens)
    return 1e3 * cost.step_s(work)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="interpreter with aiconfigurator")
    parser.add_argument("--limit", type=float, default=25.0, metavar="PERCENT")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asked = cells(Path(folder))
        run = subprocess.run(
            [args.python, "-c", _THEIRS], input=json.dumps(asked), capture_output=True, text=True, check=False
        )
    if run.returncode:
        sys.stderr.write(run.stderr)
        return 1
    theirs = json.loads(run.stdout)
    rows = []
    for cell, their_ms in zip(asked, theirs, strict=True):
        decodes = cell["mode"] == "static_gen"
        what = f"{cell['rows']} rows" if decodes else f"{cell['rows']} x {cell['tokens']} tokens"
        ms = ours_ms(cell)
        off = 100 * (ms / their_ms - 1)
        mark = " **" if abs(off) > args.limit else ""
        rows.append([cell["device"], cell["model"], what, f"{ms:.1f}", f"{their_ms:.1f}", f"{off:+.0f} %{mark}"])
    sys.stdout.write(markdown_table(["device", "model", "work"], ["ours, ms", "aiconfigurator, ms", "off"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
