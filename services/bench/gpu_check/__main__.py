"""One section of `scripts/gpu_check`: `python -m cohort.services.bench.gpu_check SECTION`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from cohort.common.engine import compiled_kernels
from cohort.services.bench.gpu_check import (
    attention,
    decode,
    environment,
    fill,
    golden,
    kernels,
    kv_transfer,
    pipeline,
    prefill,
)
from cohort.services.bench.gpu_check.context import Check
from cohort.services.bench.gpu_check.report import Findings, table

SECTIONS: dict[str, Callable[[Check], None]] = {
    "environment": environment.run,
    "kernels": kernels.run,
    "golden": golden.run,
    "attention": attention.run,
    "decode-8b": lambda check: decode.run(check, "Llama-3-8B"),
    "kv-transfer": kv_transfer.run,
    "prefill": prefill.run,
    "decode-14b": lambda check: decode.run(check, "Qwen2.5-14B"),
    "fill": fill.run,
    "pipeline": pipeline.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--device", default="cuda:0", help="with its number (default: %(default)s), or cpu")
    parser.add_argument("--folder", type=Path, help="for models and run files")
    parser.add_argument("--rows", type=Path, help="file to append the findings to")
    options = parser.parse_args()
    device = torch.device(options.device)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="cohort-gpu-"))
    found = Findings(options.section, options.rows)
    compiled_kernels.keep_in_cache()
    try:
        with torch.inference_mode():
            SECTIONS[options.section](Check(device, device.type == "cuda", folder, found))
    except Exception as error:  # of any kind: the table tells
        traceback.print_exc()
        words = str(error).partition("\n")[0]
        found.checked("ran to its end", False, f"{type(error).__name__}: {words}")
    print(table(found.rows))
    return int(any(row.verdict == "fail" for row in found.rows))


if __name__ == "__main__":
    sys.exit(main())
