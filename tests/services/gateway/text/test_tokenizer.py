from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from cohort.common.errors import ModelError, RequestError
from cohort.services.gateway.text.tokenizer import PromptTooLong, Tokenizer
from tests.services.gateway import tiny_model

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  two\nlines  "}],
    [
        {"role": "user", "content": "a<|end|>b"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "é🦊"},
    ],
    [{"role": "user", "content": "named", "name": "Ada"}],
]


def reference(model_dir: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(model_dir))


@pytest.fixture(scope="module")
def real_pair(real_model_dir: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer(real_model_dir), reference(real_model_dir)


@given(st.text(max_size=60) | st.sampled_from(["<|im_end|>", "a<|im_start|>b <|endoftext|>", " ", ""]))
def test_encodes_and_decodes_like_transformers(real_pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = real_pair
    ids = theirs(text)["input_ids"]
    assert ours.encode(text, special_tokens=True) == ids
    assert ours.encode(text, special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ids, skip_special=True) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
async def test_renders_chats_like_transformers(
    real_pair: tuple[Tokenizer, Any], chat: list[dict[str, Any]], prompt: bool
) -> None:
    ours, theirs = real_pair
    expected = theirs.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=True, return_dict=False)
    assert await ours.encode_chat(chat, add_generation_prompt=prompt, variables={}, limit=8192, owner="") == expected


# What published templates use: special tokens by name, macros, loop controls, tojson, namespaces, dates, generation.
TEMPLATES = [
    tiny_model.TEMPLATE,
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if not m.content %}{% continue %}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{{ ns.n }}:{{ m | tojson }}\n{% endfor %}",
    "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}{% for m in messages %}{% generation %}{{ turn(m) }}"
    "{% endgeneration %}\n{% endfor %}{{ strftime_now('%Y') }}{% if tools is none %}-{% endif %}",
    "{%- for m in messages %}\n    {%- if m.name is defined %}{{ m.name }}: {% endif %}\n{{ m.content }}\n"
    "  {# a comment #}\n{% endfor %}",
    "{% for m in messages %}{{ {'a': m.content, 'b': [1, none, true]} | tojson(indent=2) }}{% endfor %}"
    "{{ dict(x=1) | tojson }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_other_templates_render_like_transformers(tmp_path: Path, template: str) -> None:
    folder = tiny_model.write_model(tmp_path / "m", template=template)
    ours, theirs = Tokenizer(folder), reference(folder)
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert ours.render_chat(chat, add_generation_prompt=True, variables={}) == expected


def test_variables_reach_the_template(tmp_path: Path) -> None:
    folder = tiny_model.write_model(tmp_path / "m", template="{{ 'think' if enable_thinking else 'quick' }}")
    assert Tokenizer(folder).render_chat([], add_generation_prompt=True, variables={"enable_thinking": True}) == "think"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content + 1 }}", "{{ 1 // 0 }}"]
)
def test_a_templates_refusal_is_the_clients_error(tmp_path: Path, template: str) -> None:
    folder = tiny_model.write_model(tmp_path / "m", template=template)
    with pytest.raises(RequestError) as caught:
        Tokenizer(folder).render_chat(CHATS[0], add_generation_prompt=True, variables={})
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_template_cannot_leave_the_sandbox(tmp_path: Path) -> None:
    folder = tiny_model.write_model(tmp_path / "m", template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(RequestError):
        Tokenizer(folder).render_chat(CHATS[0], add_generation_prompt=True, variables={})


def test_no_template_is_a_clear_error(tmp_path: Path) -> None:
    folder = tiny_model.write_model(tmp_path / "m", template=None)
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(folder).render_chat(CHATS[0], add_generation_prompt=True, variables={})


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    folder = tiny_model.write_model(
        tmp_path / "m",
        template=None,
        tokenizer_config={"chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]},
    )
    assert Tokenizer(folder).render_chat([], add_generation_prompt=True, variables={}) == "D"


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": tiny_model.BOS, "eos_token": tiny_model.EOS, "add_bos_token": True},
        {"bos_token": tiny_model.BOS, "eos_token": tiny_model.EOS, "add_bos_token": True, "add_eos_token": True},
        {"bos_token": tiny_model.BOS, "eos_token": tiny_model.EOS, "add_bos_token": False},
        {
            "bos_token": tiny_model.BOS,
            "eos_token": {
                "content": tiny_model.EOS,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "single_word": False,
                "__type": "AddedToken",
            },
        },
        {"bos_token": "<new>", "eos_token": tiny_model.EOS},
    ],
)
def test_special_tokens_around_a_text_are_those_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    backend = tiny_model.byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{tiny_model.BOS} $A", special_tokens=[(tiny_model.BOS, backend.token_to_id(tiny_model.BOS))]
    )
    folder = tiny_model.write_model(tmp_path / "m", backend, tokenizer_config=config)
    ours, theirs = Tokenizer(folder), reference(folder)
    for text in ("hello fox", "a<new>b", ""):
        assert ours.encode(text, special_tokens=True) == theirs(text)["input_ids"]
        assert ours.encode(text, special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_folder_without_tokenizer_json_falls_back_to_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tiny_model.write_model(tmp_path / "m", tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    backend = tiny_model.byte_level()
    backend.model.save(str(folder))  # vocab.json and merges.txt, as older models come
    (folder / "tokenizer.json").unlink()
    ours = Tokenizer(folder)
    assert ours.encode("hello fox", special_tokens=True) == reference(folder)("hello fox")["input_ids"]


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    folder = tiny_model.write_model(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(folder)


async def test_a_long_prompt_does_not_stall_the_loop(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on while the encoder works: it is on another thread, and without the interpreter's lock."""
    turns, during = 0, []
    encode = tokenizer.encode

    def counted(text: str, *, special_tokens: bool) -> list[int]:
        before = turns
        ids = encode(text, special_tokens=special_tokens)
        during.append(turns - before)
        return ids

    async def watch() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    monkeypatch.setattr(tokenizer, "encode", counted)
    watcher = asyncio.create_task(watch())
    text = "The quick brown fox " * 20_000
    [ids] = await tokenizer.encode_all([text], special_tokens=True, limit=10**6)
    watcher.cancel()
    assert len(ids) > 20_000
    (turns_while_encoding,) = during
    assert turns_while_encoding > 5


async def test_a_text_far_too_long_is_refused_before_it_is_encoded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("encoded"))
    text = "x " * 500_000
    with pytest.raises(RequestError, match=r"512 tokens.*at least") as caught:
        await tokenizer.encode_all(["short", text], special_tokens=True, limit=512)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="at least"):
        chat = [{"role": "user", "content": text}]
        await tokenizer.encode_chat(chat, add_generation_prompt=True, variables={}, limit=512, owner="")


# Runs that are one token, words, control characters that the real model's tokenizer drops, and its own special tokens.
_RUNS = st.tuples(
    st.sampled_from(
        [" ", "=", "-", "#", "\n", "a", "ManagementPlaneProtection", "\x04", "─", "東京", "<|im_end|>", "é", "▁", "<b>"]
    ),
    st.integers(1, 100),
).map(lambda run: run[0] * run[1])
_TEXTS = st.lists(_RUNS | st.text(max_size=20), max_size=8).map("".join)


@given(_TEXTS)
@example("▁" * 80)
@example(" " * 160 + "\x04" * 160)
def test_a_text_that_may_fit_is_never_refused(bounding: list[Tokenizer], composing: Tokenizer, text: str) -> None:
    for each in (*bounding, composing):
        tokens = len(each.encode(text, special_tokens=False))
        assert each.least_tokens(text) <= tokens
        each.refuse_too_long(text, tokens, "prompt")


@given(_TEXTS, st.integers(1, 50))
def test_a_text_with_more_bytes_than_the_longest_tokens_have_is_refused(
    bounding: list[Tokenizer], text: str, limit: int
) -> None:
    text = text.replace("\x04", "")  # of which the real model has no token
    for each in bounding:
        pieces = filter(None, map(each.piece, range(each.vocab_size)))
        longest = max(len(piece.encode()) for piece in pieces)  # at least as many as it stands for
        if len(text.encode()) > limit * longest:
            with pytest.raises(PromptTooLong, match=f"{limit} tokens"):
                each.refuse_too_long(text, limit, "prompt")


@pytest.fixture(scope="module")
def bounding(
    tokenizer: Tokenizer, real_pair: tuple[Tokenizer, Any], tmp_path_factory: pytest.TempPathFactory
) -> list[Tokenizer]:
    """Byte-level ones, and those with a fallback to bytes as Llama 2, Mistral and Gemma have them."""
    llama, mistral, gemma = (tiny_model.byte_fallback() for _ in range(3))
    mistral.normalizer = None
    mistral.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    gemma.normalizer = normalizers.Replace(" ", "▁")
    gemma.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    gemma.add_tokens(["▁▁▁▁▁▁▁▁", "<b>"])
    found = [tokenizer, real_pair[0]]
    for backend in (llama, mistral, gemma):
        folder = tmp_path_factory.mktemp("fallback") / "m"
        found.append(Tokenizer(tiny_model.write_model(folder, backend, template=None, tokenizer_config={})))
    return found


@pytest.fixture(scope="module")
def composing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    backend = tiny_model.byte_level()
    backend.normalizer = normalizers.NFC()
    return Tokenizer(tiny_model.write_model(tmp_path_factory.mktemp("nfc") / "m", backend))


def test_words_count_by_their_letters(real_pair: tuple[Tokenizer, Any], composing: Tokenizer) -> None:
    """The real model's longest token is a row of 81 spaces, its longest word has 25 bytes."""
    real, _ = real_pair
    assert real.least_tokens("=" * 8100) == 100 and real.least_tokens("abcd " * 8100) == 1296
    assert real.least_tokens("\x04" * 8100) == 0 and not real.encode("\x04" * 8100, special_tokens=False)
    assert composing.least_tokens("abcd " * 8100) > 0 == composing.least_tokens("abcd " * 8100 + "é")


@pytest.mark.parametrize("lost", [{"normalizer": normalizers.Strip()}, {"pre_tokenizer": pre_tokenizers.Whitespace()}])
def test_a_fallback_that_drops_text_bounds_nothing(tmp_path: Path, lost: dict[str, Any]) -> None:
    backend = tiny_model.byte_fallback()
    for name, value in lost.items():
        setattr(backend, name, value)
    folder = tiny_model.write_model(tmp_path / "m", backend, template=None, tokenizer_config={})
    assert Tokenizer(folder).least_tokens("a" * 10_000) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
        {"normalizer": normalizers.Lowercase()},
        {"decoder": decoders.Fuse()},
    ],
)
def test_a_tokenizer_that_drops_text_bounds_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    backend = tiny_model.byte_level()
    for name, value in change.items():
        setattr(backend, name, value)
    ours = Tokenizer(tiny_model.write_model(tmp_path / "m", backend))
    assert ours.least_tokens("a" * 10_000) == 0


async def test_long_texts_of_any_route_are_within_the_budget(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[str, int]] = []
    run = tokenizer.texts.run
    monkeypatch.setattr(
        tokenizer.texts, "run", lambda size, work, owner: (sizes.append((owner, size)), run(size, work, owner))[1]
    )
    text = "é " * 30_000
    await tokenizer.encode_all([text, "é"], special_tokens=True, limit=10**6, owner="alice")
    chat = [{"role": "user", "content": text}]
    await tokenizer.encode_chat(chat, add_generation_prompt=False, variables={}, limit=10**6, owner="bob")
    assert sizes[0] == ("alice", 90_002) and sizes[1] > ("bob", 90_000)


def test_the_gateway_imports_no_torch_and_no_transformers(model_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import cohort.services.gateway.service\n"
        "from cohort.services.gateway.text.tokenizer import Tokenizer\n"
        "Tokenizer(Path(sys.argv[1])).encode('hi', special_tokens=True)\n"
        "heavy = ('torch', 'transformers', 'cohort.common.engine', 'cohort.kernels')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(model_dir)], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
