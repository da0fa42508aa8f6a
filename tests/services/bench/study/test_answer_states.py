"""The length study's hidden states are those of the prompts as served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import transformers

from cohort.common.config import load_config
from cohort.common.errors import ConfigError
from cohort.services.bench.engine.inside.in_process import InProcessEngine
from cohort.services.bench.study.states import Asked, as_served, read_asked, states_of
from tests.engine_models import make_runner


def test_every_prompt_has_the_state_it_ends_in(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama")
    random = Random(4)
    prompts = {100 + i: [random.randrange(1, 90) for _ in range(random.randint(2, 20))] for i in range(70)}
    runner = make_runner(folder)
    config = load_config(preset="unified", overrides={"kv": {"prefix_caching": False}})
    found = states_of(InProcessEngine(config, runner), runner, prompts)
    assert sorted(found) == sorted(prompts)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for index in (100, 133, 169):
        with torch.inference_mode():
            hidden = model(torch.tensor([prompts[index]]), output_hidden_states=True).hidden_states[-1][0, -1]
        np.testing.assert_allclose(found[index].astype(np.float32), hidden.numpy(), rtol=5e-3, atol=5e-3)


def test_a_model_that_keeps_no_states_is_refused(model_folder: Callable[[str], Path]) -> None:
    runner = make_runner(model_folder("gpt2"))
    with pytest.raises(ConfigError, match="keeps no hidden states"):
        states_of(InProcessEngine(load_config(preset="unified"), runner), runner, {0: [1, 2, 3]})


def test_chat_prompts_get_the_models_template(real_model: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_model)
    tokens = tokenizer.encode("Name three colours.\n\n### Response:\n")
    served = as_served(real_model, [Asked(3, tokens), Asked(4, tokens, chat=False)])
    assert served[4] == tokens
    assert tokenizer.decode(served[3]).endswith(
        "<|im_start|>user\nName three colours.\n\n### Response:\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_answers_are_read_but_for_a_cut_off_line(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_bytes(b'{"index":5,"tokens":[1,2],"output_tokens":9,"chat":false}\n{"index":6,"tok')
    assert read_asked(file) == [Asked(5, [1, 2], chat=False)]
    file.write_bytes(b"nonsense\n")
    with pytest.raises(ConfigError, match=r"answers\.jsonl"):
        read_asked(file)
