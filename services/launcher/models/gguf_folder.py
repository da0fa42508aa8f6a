"""Makes a folder in Hugging Face format around a GGUF file: its configuration, its tokenizer, and a link to it.

Called by the launcher where `--model` names a GGUF file, or a folder with one, and by hand where services start without
a launcher (`python -m cohort.services.launcher.models.gguf_folder FILE FOLDER`). All processes
then serve a folder as any other; the weights stay in the file, as they are. A tokenizer.json beside the file is taken
before the one that the metadata describe.

The folder lies in the cache under a digest of the file's path, size and time, and appears by one rename. Imports torch
and transformers only in the process of its own that makes it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cohort.common.errors import CohortError, ModelError
from cohort.common.paths import GGUF_FILE, cache_dir
from cohort.services.launcher.models.gguf_config import generation_config, model_config

TIMEOUT_S = 600.0
_BESIDE = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_LARGEST_FIELD = 4096
"""Elements of a field that may matter to the configuration; lists of tokens are longer, and are read elsewhere."""


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` names: itself, or the only one of a folder without a config.json; else None.

    Raises `ModelError` for a folder with several.
    """
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:6])
        raise ModelError(f"{path} holds {len(files)} GGUF files ({names}); name the one to serve: --model FILE")
    return files[0] if files else None


def folder_for(file: Path) -> Path:
    """Where the folder of this file lies; its last part is the file's name, which clients see."""
    file = file.resolve()
    state = file.stat()
    digest = hashlib.sha256(f"{file}\0{state.st_size}\0{state.st_mtime_ns}".encode()).hexdigest()[:16]
    return cache_dir() / "gguf" / digest / file.stem


def served_folder(path: Path) -> Path:
    """`path` itself, or the folder around the GGUF file that it names; made where it is absent. Raises `ModelError`."""
    file = gguf_file(path)
    if file is None:
        return path
    folder = folder_for(file)
    if not folder.is_dir():
        command = [sys.executable, "-P", "-m", "cohort.services.launcher.models.gguf_folder", str(file), str(folder)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ModelError(f"{file}: its metadata were not read within {TIMEOUT_S:.0f} s") from None
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            raise ModelError(lines[-1] if lines else f"{file}: its metadata could not be read")
    return folder


def make_folder(file: Path, folder: Path) -> None:
    """Raises `ModelError` naming the file and what is missing or not served."""
    file = file.resolve()
    fields, tensors, factors = _metadata(file)
    try:
        config = model_config(fields, tensors, factors)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        for name, content in (("config.json", config), ("generation_config.json", generation_config(fields))):
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        _tokenizer(file, partial)
        (partial / GGUF_FILE).symlink_to(file)
        if not folder.exists():  # another process may have made it meanwhile
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _metadata(file: Path) -> tuple[dict[str, Any], dict[str, list[int]], list[float]]:
    """Fields but for the long ones, the shape of every tensor, and the factors of its rotary frequencies."""
    from gguf import GGUFReader

    try:
        reader: Any = GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{file}: not a complete GGUF file: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items() if len(field.data) <= _LARGEST_FIELD}
    tensors = {tensor.name: [int(size) for size in reversed(tensor.shape)] for tensor in reader.tensors}
    factors: list[float] = next(
        (tensor.data.tolist() for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), []
    )
    return fields, tensors, factors


def _tokenizer(file: Path, folder: Path) -> None:
    if (file.parent / _BESIDE[0]).is_file():
        for name in _BESIDE:
            if (file.parent / name).is_file():
                shutil.copyfile(file.parent / name, folder / name)
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # transformers raises whatever its converters meet
        raise ModelError(
            f"{file}: no tokenizer could be made from its metadata ({type(error).__name__}: {error}); put the model's "
            "tokenizer.json and tokenizer_config.json into the same folder"
        ) from error
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    for key in ("backend", "is_local", "local_files_only"):
        settings.pop(key, None)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cohort.services.launcher.models.gguf_folder",
        description="Make a model folder around a GGUF file, whose weights stay where they are.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the GGUF file")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to make")
    options = parser.parse_args(arguments)
    if options.folder.exists():
        return 0
    try:
        make_folder(options.file, options.folder)
    except (CohortError, OSError) as error:
        sys.stderr.write(f"{error}\n".replace("\n", " ").rstrip() + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
