"""One section of `scripts/gpu_check`: `python -m cohort.services.bench.gpu_check SECTION`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from cohort.common.engine.device import compiled_kernels
from cohort.services.bench.gpu_check.engine import kv_transfer, model, pipeline
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.guard import Guard, end_with
from cohort.services.bench.gpu_check.frame.plan import SECTIONS
from cohort.services.bench.gpu_check.frame.report import Findings, table
from cohort.services.bench.gpu_check.kernels import attention, device, experts, library, matrices


def tests_of(*chosen: str) -> Callable[[Check], None]:
    """Return a section of tests. Only these need pytest."""

    def run(check: Check) -> None:
        try:
            from cohort.services.bench.gpu_check.frame import tests
        except ImportError as error:
            check.found.add_note("tests", str(error), "not run")
            return
        tests.run(check, *chosen)

    return run


RUN: dict[str, Callable[[Check], None]] = {
    "device": device.run,
    "smoke": tests_of("test_recorded_steps.py", "sampling/test_sampling.py::test_many_rows_of_a_kind"),
    "kernels": tests_of("test_served_shapes.py", "test_slots.py"),
    "families": tests_of("test_formats.py", "-k", "family_gives"),
    "families-16-bits": tests_of("test_formats.py", "-k", "family_in"),
    "formats": tests_of("test_formats.py", "-k", "a_format or mxfp4"),
    "golden": tests_of("test_presets.py", "-k", "unified or probabilities"),
    "golden-presets": tests_of("test_presets.py", "-k", "not unified and not probabilities"),
    "kv-transfer": kv_transfer.run,
    "pipeline": pipeline.run_default,
    "pipeline-unified": pipeline.run_unified,
    "pipeline-disaggregated": pipeline.run_disaggregated,
    "model-8b": model.run_8b,
    "products": matrices.run,
    "library-products": library.run,
    "attention": attention.run,
    "coded-products": matrices.run_coded,
    "coded-experts": experts.run,
    "batch-invariant": model.run_invariant,
    "model-14b": model.run_14b,
    "tests": tests_of(),
}
_CPU_DEADLINE_FACTOR = 50.0  # on a processor, which may be a busy one


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--device", default="cuda:0", help="with its number (default: %(default)s), or cpu")
    parser.add_argument("--folder", type=Path, help="for models and run files")
    parser.add_argument("--logs", type=Path, help="for what is to be kept")
    parser.add_argument("--rows", type=Path, help="file to append the findings to")
    parser.add_argument("--together", action="store_true", help="others run beside it: no figure is a speed")
    parser.add_argument("--seconds", type=float, default=3600.0, help="until the section is to end")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="process without which it ends")
    options = parser.parse_args()
    # The runner's first word; what a section has started is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Run a section; return 0, or 1 if something failed."""
    chosen = torch.device(options.device)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="cohort-gpu-"))
    logs = options.logs or folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    found = Findings(options.section, options.rows, alone=not options.together)
    real = chosen.type == "cuda"
    guard = Guard(found, chosen, options.seconds, deadline_factor=1.0 if real else _CPU_DEADLINE_FACTOR)
    end_with(options.parent)
    compiled_kernels.keep_in_cache()
    try:
        with torch.inference_mode():
            RUN[options.section](Check(chosen, real, folder, found, guard, logs, alone=not options.together))
    except Exception as error:  # of any kind: the table tells
        traceback.print_exc()
        message = str(error).partition("\n")[0]
        found.checked("ran to its end", False, f"{type(error).__name__}: {message}")
    print(table(found.rows))
    return int(any(row.verdict == "fail" for row in found.rows))


if __name__ == "__main__":
    sys.exit(main())
