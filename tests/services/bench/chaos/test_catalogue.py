"""The requests of a soak: the same for the same seed, of every API, and a model that can answer them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from cohort.services.bench.chaos import tiny_model
from cohort.services.bench.chaos.answer_content import Api
from cohort.services.bench.chaos.catalogue import catalogue, fresh, refusal


def test_the_same_seed_makes_the_same_requests_of_every_api() -> None:
    cases = catalogue(3)
    assert cases == catalogue(3) != catalogue(4)
    assert set(Counter(case.api for case in cases)) == set(Api)
    assert [fresh(Random(5)), refusal(Random(5), "key")] == [fresh(Random(5)), refusal(Random(5), "key")]


def test_every_answer_is_greedy_or_seeded() -> None:
    for case in [*catalogue(0), *(fresh(Random(number)) for number in range(50))]:
        assert case.body["temperature"] == 0 or "seed" in case.body, case.name


def test_refusals_are_of_many_kinds_and_never_the_same_twice() -> None:
    random = Random(1)
    made = [refusal(random, "key") for _ in range(150)]
    assert {each.status for each in made} == {400, 401, 404, 415}
    unknown = [each.path for each in made if each.name == "refused: unknown path"]
    assert len(unknown) == len(set(unknown)) > 5


def test_the_tiny_model_has_what_chats_and_forms_need(tmp_path: Path) -> None:
    folder = tiny_model.write(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    assert tokenizer.decode(tokenizer.encode("Grüße, 東京 🦊").ids) == "Grüße, 東京 🦊"
    assert tokenizer.id_to_token(config["eos_token_id"]) == "<|im_end|>"
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    again = tiny_model.write(tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
