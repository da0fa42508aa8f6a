"""The served model as the gateway knows it: its name, its limits, its end tokens and how it wants to be sampled.

Read by `service.py` at start from a model folder in Hugging Face format; no weights, no torch. It never guesses: a
folder without a context length needs `model.max_model_len`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cohort.common.config import ModelConfig
from cohort.common.errors import ModelError, RequestError
from cohort.common.json_files import read_json_object
from cohort.common.paths import DEFAULT_MODEL_NAME, default_model_dir
from cohort.services.gateway.requests.added_adapters import AdapterTable
from cohort.services.gateway.requests.embedding_form import NO_EMBEDDINGS, EmbeddingForm, read_embedding_form
from cohort.services.gateway.requests.formats import AnswerFormat
from cohort.services.gateway.text.tokenizer import Tokenizer

# The same limit has several names in published configurations; the first one present counts.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")


_LISTED = 16
"""Names in one message, at most."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for a request that names none of its own. `max_tokens` is for chats; 0 = what the context leaves."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 0


# What authors recommend on their model's page, for a checkpoint whose generation_config.json does not say it.
_RECOMMENDED = {DEFAULT_MODEL_NAME: SamplingDefaults(temperature=0.2, top_p=0.9)}
# Where generation_config.json may name a default: the least and the largest value that a request may ask for too.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 10.0),
    "max_new_tokens": (1, 2**31 - 1),
}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Served model. `max_model_len` bounds prompt + output; `eos_token_ids` end a generation as in transformers."""

    name: str
    path: Path
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults = SamplingDefaults()
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Folders of LoRA adapters by the names that clients use."""
    embedding: EmbeddingForm = NO_EMBEDDINGS

    @property
    def names(self) -> frozenset[str]:
        """Names that clients may use: the served one or, if they know where it lies, the folder; or an adapter's."""
        return frozenset((self.name, str(self.path), *self.adapters))

    @property
    def listed(self) -> str:
        """Names that exist, for messages."""
        names = [f"`{name}`" for name in (self.name, *self.adapters)]
        return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")

    def known_tokens(self, ids: list[int], param: str) -> list[int]:
        """Return the ids. Raises a `RequestError` that names `param` if one is not in the vocabulary."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            token_id = next(token_id for token_id in ids if not 0 <= token_id < self.vocab_size)
            shown = token_id if abs(token_id) < 10**20 else "a number of more than 20 digits"
            raise RequestError(
                f"{param}: {shown} is no token id; the vocabulary has {self.vocab_size} tokens.", param=param
            )
        return ids

    def reference(self, adapter: str) -> tuple[str, str]:
        """Return an adapter's name for workers, and its folder if they learn that from the request. Raises
        `RequestError` for one that was removed."""
        adapters = self.adapters
        return adapters.reference(adapter) if adapter and isinstance(adapters, AdapterTable) else (adapter, "")

    def adapter_of(self, model: str | None) -> str:
        """Return the adapter that a request's `model` names; "" = the base model."""
        return model if model is not None and model != self.name and model in self.adapters else ""


@dataclass(frozen=True, slots=True)
class Served:
    """Model with its tokenizer. `tool_format`: how it writes answers, None without a template. `max_model_len`: the
    model's, or less where the workers hold less."""

    card: ModelCard
    tokenizer: Tokenizer
    tool_format: AnswerFormat | None
    max_model_len: Callable[[], int]


def read_model_card(config: ModelConfig) -> ModelCard:
    """Read the model's configuration. Raises `ModelError` that names the file and the missing part."""
    path = Path(config.path).expanduser().resolve() if config.path else default_model_dir()
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{path} is not a model folder in Hugging Face format: there is no config.json")
    settings = read_json_object(file)
    # Multimodal configurations keep the language model's numbers one level down.
    text = settings.get("text_config")
    text = text if isinstance(text, dict) else settings
    model_len = next((int(text[key]) for key in _LENGTH_KEYS if isinstance(text.get(key), int)), 0)
    if config.max_model_len:
        if model_len and config.max_model_len > model_len:
            raise ModelError(f"model.max_model_len is {config.max_model_len}, but {file} allows {model_len} tokens")
        model_len = config.max_model_len
    if not model_len:
        raise ModelError(f"{file} names no context length; set model.max_model_len")
    vocab_size = text.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ModelError(f"{file} names no vocab_size")
    name = config.served_name or path.name
    if taken := {name, str(path)} & config.lora.keys():
        raise ModelError(f"model.lora: {taken.pop()!r} is the base model's name; give the adapter another")
    return ModelCard(
        name=name,
        path=path,
        max_model_len=model_len,
        vocab_size=vocab_size,
        eos_token_ids=_end_tokens(path, text),
        sampling=_sampling_defaults(path) if config.sampling_defaults == "model" else SamplingDefaults(),
        embedding=_embedding(path, text),
        adapters={adapter: Path(folder).expanduser().resolve() for adapter, folder in config.lora.items()},
    )


def _embedding(path: Path, settings: dict[str, Any]) -> EmbeddingForm:
    # OPT-350m's last states are narrower than its layers.
    width = settings.get("word_embed_proj_dim", settings.get("hidden_size", settings.get("n_embd")))
    if not isinstance(width, int):
        return NO_EMBEDDINGS
    return read_embedding_form(path, width)


def _sampling_defaults(path: Path) -> SamplingDefaults:
    """Read generation_config.json as vLLM does (without `do_sample`: a client expects a seed to matter), or its
    authors' recommendation where it names nothing."""
    file = path / "generation_config.json"
    generation = read_json_object(file) if file.is_file() else {}
    named: dict[str, float] = {}
    for name, (least, most) in _RANGES.items():
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ModelError(
                f"{file}: {name} is {value!r}, but a request may ask for {least:g} to {most:g}; correct it, or set "
                "model.sampling_defaults=neutral"
            )
        named[name] = value
    if not named:
        return _RECOMMENDED.get(path.name, SamplingDefaults())
    return SamplingDefaults(
        temperature=float(named.get("temperature", 1.0)),
        top_p=float(named.get("top_p", 1.0)),
        top_k=max(0, int(named.get("top_k", 0))),
        min_p=float(named.get("min_p", 0.0)),
        repetition_penalty=float(named.get("repetition_penalty", 1.0)),
        max_tokens=int(named.get("max_new_tokens", 0)),
    )


def _end_tokens(path: Path, settings: dict[str, Any]) -> tuple[int, ...]:
    """Return the end tokens of generation_config.json, as transformers does, else those of config.json."""
    generation = path / "generation_config.json"
    named = read_json_object(generation).get("eos_token_id") if generation.is_file() else None
    if named is None:
        named = settings.get("eos_token_id")
    if named is None:
        return ()
    tokens = named if isinstance(named, list) else [named]
    if not all(type(token) is int for token in tokens):
        raise ModelError(f"{path}: eos_token_id is {str(named)[:80]}, no token's number")
    return tuple(sorted(set(tokens)))
