"""A head learns, from the states that transformers has, and drafts in the engine what it drafts in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from cohort.common.config import load_config
from cohort.common.errors import ConfigError
from cohort.common.types import SamplingParams
from cohort.services.bench.heads.collecting import Collector, Text, Work, read_texts, write_texts
from cohort.services.bench.heads.training import DEPTH, Head, Options, begin, drafts, frequent, judge, train
from tests.common.engine.drafts.test_eagle_head import Served
from tests.common.engine.driver import VOCAB, random_prompts
from tests.engine_models import make_runner

ModelFolder = Callable[[str], Path]
ANSWER = 24


@pytest.fixture(scope="module")
def collected(model_folder: ModelFolder) -> tuple[Collector, list[Text]]:
    """Forty greedy answers of the tiny Llama, more than are computed at a time."""
    config = load_config(preset="unified", overrides={"kv": {"prefix_caching": False}})
    collector = Collector(config, make_runner(model_folder("llama")))
    greedy = SamplingParams(max_tokens=ANSWER, temperature=0.0)
    lengths = tuple([4 + index % 9 for index in range(40)])
    return collector, collector.run([Work(each, greedy, len(each)) for each in random_prompts(lengths)])


def test_states_are_those_of_the_model_in_its_own_answers(
    model_folder: ModelFolder, collected: tuple[Collector, list[Text]]
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32).eval()
    collector, texts = collected
    assert len(texts) == 40
    for text in texts[::13]:
        asked = text.tokens[: text.begins][None]
        answer = model.generate(asked, max_new_tokens=ANSWER, do_sample=False, eos_token_id=None)[0, :-1]
        assert text.tokens.tolist() == answer.tolist()  # the last token is sampled, and has no state yet
        with torch.inference_mode():
            states = model.model(answer[None]).last_hidden_state[0]
        torch.testing.assert_close(text.states, states, rtol=1e-4, atol=1e-4)
    embedding, product = collector.outer()
    torch.testing.assert_close(embedding, model.model.embed_tokens.weight.detach())
    torch.testing.assert_close(product, model.lm_head.weight.detach())


@pytest.mark.parametrize("most", [VOCAB, 60])
def test_a_head_learns_and_drafts_when_served_what_it_does_in_training(
    model_folder: ModelFolder, collected: tuple[Collector, list[Text]], tmp_path: Path, most: int
) -> None:
    model, (collector, texts) = model_folder("llama"), collected
    embedding, product = collector.outer()
    drafted = torch.arange(VOCAB) if most == VOCAB else frequent(texts, most, (2,), VOCAB)
    product, head = product[drafted], Head(model)
    before = judge(head, embedding, product, drafted, texts)
    losses = train(
        head, embedding, product, texts, Options(epochs=16, rows=8, rate=6e-3, cross_entropy=1.0), lambda _: None
    )
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert judge(head, embedding, product, drafted, texts)[0] > before[0]
    head.write(tmp_path, None if most == VOCAB else (drafted, product))
    head = Head(model)
    head.read(tmp_path)  # its weights are written in 16 bits
    served = Served(model, tmp_path)
    for index, text in enumerate(texts[:3]):
        known = text.begins + 5
        name = f"r{index}"
        served.driver.add(name, text.tokens[: known - 1].tolist())
        served.driver.step([(name, known - 1)])
        expected = drafts(head, embedding, product, drafted, text, [known])[0].tolist()
        assert served.driver.requests[name].tokens == text.tokens[:known].tolist()
        assert served.drafts(name, DEPTH) == expected
        assert set(expected) <= set(drafted.tolist())


def test_training_begins_with_the_best_linear_map(
    model_folder: ModelFolder, collected: tuple[Collector, list[Text]]
) -> None:
    collector, texts = collected
    (embedding, _), head = collector.outer(), Head(model_folder("llama"))
    before, text = head.fc.weight.clone(), texts[0]
    begin(head, embedding, texts)
    assert not torch.equal(head.fc.weight, before)
    with torch.no_grad():
        said = head(embedding[text.tokens[None, 1:]], text.states[None, :-1])[0]
    linear = torch.cat([embedding[text.tokens[1:]], text.states[:-1]], dim=1) @ head.fc.weight.t() + head.fc.bias
    torch.testing.assert_close(said, linear.detach())
    given, wanted = (
        torch.cat(each)
        for each in zip(
            *[
                (torch.cat([embedding[t.tokens[1:]], t.states[:-1]], dim=1)[t.begins - 2 :], t.states[t.begins - 1 :])
                for t in texts
            ],
            strict=True,
        )
    )
    ones = torch.ones(len(given), 1)
    least = torch.linalg.lstsq(torch.cat([given, ones], dim=1).double(), wanted.double()).solution
    error = (given @ head.fc.weight.t() + head.fc.bias - wanted).pow(2).mean().item()
    best = (torch.cat([given, ones], dim=1).double() @ least - wanted).pow(2).mean().item()
    assert error < 1.02 * best + 1e-6


def test_drafted_tokens_are_the_most_frequent_of_what_is_learned() -> None:
    text = Text(torch.tensor([9, 9, 9, 9, 5, 5, 5, 3, 3, 7]), torch.zeros(10, 4), begins=4)
    assert frequent([text], 3, (1,), 12).tolist() == [1, 3, 5]
    assert frequent([text], 5, (), 12).tolist() == [0, 1, 3, 5, 7]


def test_texts_are_read_as_they_were_written(tmp_path: Path) -> None:
    texts = [Text(torch.arange(n), torch.randn(n, 4).to(torch.bfloat16), begins=n // 2) for n in (3, 5)]
    write_texts(texts, tmp_path / "states" / "0.safetensors")
    for one, other in zip(read_texts(tmp_path / "states" / "0.safetensors", 4), texts, strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.states, other.states)
        assert one.begins == other.begins
    with pytest.raises(ConfigError, match="states of 4 numbers, the model's have 8"):
        read_texts(tmp_path / "states" / "0.safetensors", 8)
    (tmp_path / "x.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ConfigError, match="no collected texts"):
        read_texts(tmp_path / "x.safetensors", 4)


def test_what_cannot_be_learned_for_or_gone_on_from_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    config = load_config(preset="unified")
    with pytest.raises(ConfigError, match="states of gemma3_text models are not kept"):
        Collector(config, make_runner(model_folder("gemma3")))
    with pytest.raises(ConfigError, match="no head to go on from"):
        Head(model_folder("llama")).read(tmp_path)


def test_minutes_bound_a_training(model_folder: ModelFolder, collected: tuple[Collector, list[Text]]) -> None:
    collector, texts = collected
    options = replace(Options(), epochs=10**6, minutes=0.002)
    assert 0 < len(train(Head(model_folder("llama")), *collector.outer(), texts, options, lambda _: None)) < 10**4
