"""What a step of prompts beside decodes costs the host on a GPU: launches a layer, and the time to make them.

`python -m cohort.services.bench.gpu_check.engine.launching`. Steps run on the processor over a model of tiny
matrices and many layers, with Triton compiling for a GPU that is not there and a launcher that launches nothing: what
is left is the host's part, Python and torch included. A real driver adds some 3 us a launch (`DRIVER_S`), which no
machine without one can show. A process of its own, since Triton decides at import whether it compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

DRIVER_S = 3e-6
"""Of one launch inside the driver, of a kernel with few arguments: not measured here."""

_LAYERS = 32
_MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class Launching:
    """One kind of step: launches of the whole step, and the host's time for it (median), the driver's left out."""

    step: str
    launches: int
    host_us: float

    @property
    def with_driver_us(self) -> float:
        return self.host_us + 1e6 * DRIVER_S * self.launches


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cohort.services.bench.gpu_check.engine.launching", description=__doc__
    )
    parser.add_argument("--steps", type=int, default=20, help="steps measured of every kind (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="a list of objects instead of a table")
    arguments = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"
    found = measure(arguments.steps)
    if arguments.json:
        json.dump([asdict(each) for each in found], sys.stdout, indent=1)
        return 0
    print(f"| step, {_LAYERS} layers | launches | host, us | with {1e6 * DRIVER_S:.0f} us a launch in the driver |")
    print("|---|---:|---:|---:|")
    for each in found:
        print(f"| {each.step} | {each.launches} | {each.host_us:.0f} | {each.with_driver_us:.0f} |")
    return 0


def measure(steps: int) -> list[Launching]:
    """64 decode rows, alone and beside a prompt: kernel by kernel, and recorded."""
    import torch

    from cohort.common.engine.config.device_memory import DeviceShare
    from cohort.common.engine.runner.model_runner import ModelRunner
    from cohort.services.bench.gpu_check.frame import batches

    launched = _as_on_a_gpu()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        runner = ModelRunner(
            Path(folder),
            dtype="float32",
            device="cpu",
            threads=1,
            block_size=16,
            num_blocks=2048,
            host_blocks=0,
            max_rows=72,
            max_step_tokens=512,
            max_context=1024,
            share=DeviceShare(graphs=0),
            weights="random",
            device_steps=True,
        )
    engine: Any = runner._device_steps
    found = []
    kinds = {
        "64 decode rows": batches.rows_of(runner, 64, 1, 256),
        "a prompt of 16 tokens": batches.rows_of(runner, 1, 16, 16),
        "64 decode rows beside 16 prompt tokens": batches.mixed(runner, 64, 256, 16),
    }
    with torch.inference_mode():
        for name, batch in kinds.items():
            found.append(_measured(f"{name}, kernel by kernel", steps, launched, lambda b=batch: engine.launch(b)))  # type: ignore[misc]
        engine.decode.record(_Nothing(runner), _unbounded(), classes=[64])
        engine.mixed.record(_Nothing(runner), _unbounded())
        for name, batch in kinds.items():
            found.append(_measured(f"{name}, recorded", steps, launched, lambda b=batch: engine.launch(b)))  # type: ignore[misc]
    return found


def _measured(name: str, steps: int, launched: Counter[str], step: Callable[[], object]) -> Launching:
    for _ in range(3):
        step()
    launched.clear()
    with _operations()() as others:
        step()
    launches = sum(launched.values()) + others.count
    times = []
    for _ in range(steps):
        began_s = time.thread_time()
        step()
        times.append(time.thread_time() - began_s)
    return Launching(name, launches, 1e6 * median(times))


def _operations() -> Any:
    """A mode that counts torch's operations that a GPU computes: all but views and allocations."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            views = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
            if not views and "empty" not in func._schema.name:
                self.count += 1
            return func(*args, **(kwargs or {}))

    return Operations


def _unbounded() -> Any:
    from cohort.common.engine.step.decode_classes import CaptureBudget

    return CaptureBudget(1 << 60)


class _Nothing:
    """Records steps that compute nothing, as a graph's launch leaves nothing to the host."""

    def __init__(self, runner: Any) -> None:
        self._vocabulary = runner.geometry.vocab_size

    def record(self, step: Callable[[], Any]) -> Any:
        import torch

        from cohort.common.engine.step.recorded_steps import Recorded, StepResult

        result = StepResult(torch.zeros(72, self._vocabulary), None)
        return Recorded(lambda: result, 0)


def _into(layer: Any, x: Any, out: Any) -> None:
    """`Linear.into` as a GPU takes it."""
    import torch

    if out.dtype == x.dtype:
        torch.mm(x, layer.weight.t(), out=out)
    else:
        out.copy_(torch.nn.functional.linear(x, layer.weight))


def _add_into(layer: Any, x: Any, residual: Any) -> None:
    residual.addmm_(x, layer.weight.t())


def _as_on_a_gpu() -> Counter[str]:
    """The kernels of a GPU on every tensor, launched by `_launch_nothing`; what is launched is counted."""
    import torch
    from triton.runtime.driver import driver

    from cohort.common.engine.weights import linear
    from cohort.kernels.cpu import native
    from cohort.kernels.gpu import available, operators
    from cohort.kernels.gpu.attention import prefill
    from cohort.kernels.gpu.compile_offline import AbsentGpu

    launched: Counter[str] = Counter()

    class Utils:
        @staticmethod
        def load_binary(name: str, *_: Any) -> tuple[int, int, int, int, int]:
            return 0, 0, 32, 0, 1024

        @staticmethod
        def get_device_properties(_: int) -> dict[str, int]:
            return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    class Gpu(AbsentGpu):
        utils = Utils()

        @staticmethod
        def launcher_cls(source: Any, metadata: Any) -> Callable[..., None]:
            name = metadata["name"] if isinstance(metadata, dict) else metadata.name

            def launch_nothing(*_: Any) -> None:
                launched[name] += 1

            return launch_nothing

    driver.set_active(Gpu(90))
    native.ops_for = lambda tensor: None  # type: ignore[assignment]
    linear.linear_form = lambda *shape: "plain"  # type: ignore[assignment]
    layers: Any = linear.Linear
    layers.into, layers.add_into = _into, _add_into
    available.ops_for = lambda tensor: operators  # type: ignore[assignment]
    staged: Any = prefill
    staged.flash_serves = lambda query: True

    def flash(query: torch.Tensor, *_: Any) -> torch.Tensor:
        launched["flash attention"] += 1
        return query

    staged.flash_function = lambda: flash
    return launched


if __name__ == "__main__":
    sys.exit(main())
