"""Fields of vLLM's clients: a last message that the answer continues, stop strings that are shown, prompts that are
cut."""

from __future__ import annotations

from typing import Any

import pytest

from cohort.common.errors import RequestError
from cohort.services.gateway.generation.choice import StopAutomaton, StopStrings
from cohort.services.gateway.text.chat_template import ChatTemplate, to_be_continued, up_to_continuation
from tests.services.gateway.conftest import ANSWER, OpenSite, Site
from tests.services.gateway.tiny_model import CONTEXT

HI = [{"role": "user", "content": "Hi"}]
SEA = [*HI, {"role": "assistant", "content": "The sea is "}]
CALLED = {**SEA[1], "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def prompt_of(site: Site) -> str:
    """The prompt of the last request that was submitted."""
    return site.tokenizer.decode(site.manager.submitted[-1].tokens, skip_special=False)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}", "<user>e</s><assistant>a s"),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}", "<user>e</s><assistant>a s"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[0].content }}", "ea s"),
    ],
)
@pytest.mark.parametrize("space", ["", "  "])
def test_a_chat_ends_within_its_last_message(template: str, expected: str, space: str) -> None:
    messages = [{"role": "user", "content": "e"}, {"role": "assistant", "content": f"a s{space}"}]
    text = ChatTemplate(template, {}).render(to_be_continued(messages), add_generation_prompt=False, variables={})
    assert up_to_continuation(text) == expected + ("" if "trim" in template else space)


def test_a_template_without_the_last_message_is_refused() -> None:
    text = ChatTemplate("{{ messages[0].content }}", {}).render(
        to_be_continued([*HI, {"role": "assistant", "content": ""}]), add_generation_prompt=False, variables={}
    )
    with pytest.raises(RequestError, match="continue_final_message"):
        up_to_continuation(text)


async def test_the_answer_continues_the_last_message(open_site: OpenSite) -> None:
    async with open_site() as site:
        status, answer = await site.post(CHAT, {"messages": SEA, "continue_final_message": True})
        assert (status, answer["choices"][0]["message"]["content"]) == (200, ANSWER)
        assert prompt_of(site).endswith("<|end|>\n<|start|>assistant\nThe sea is ")
        status, _ = await site.post("/v1/messages", {"model": "tiny", "messages": SEA, "max_tokens": 60})
        assert status == 200 and prompt_of(site).endswith("<|start|>assistant\nThe sea is ")


@pytest.mark.parametrize(
    "change", [{"add_generation_prompt": True}, {"messages": [*HI, CALLED]}], ids=["a turn of its own", "calls"]
)
async def test_what_cannot_be_continued_is_refused(open_site: OpenSite, change: dict[str, Any]) -> None:
    async with open_site() as site:
        status, answer = await site.post(CHAT, {"messages": SEA, "continue_final_message": True, **change})
        assert (status, answer["error"]["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize("cut", range(6))
def test_a_stop_string_is_shown_however_it_was_cut(cut: int) -> None:
    stops = StopStrings(StopAutomaton(["abab", "b!"]), includes=True)
    text = "xaabab"
    assert stops.feed(text[:cut]) + stops.feed(text[cut:] + "tail") + stops.flush() == text
    assert stops.matched == "abab"


async def test_stop_strings_are_shown_on_request(open_site: OpenSite) -> None:
    stop, until = "fox", ANSWER[: ANSWER.index("fox")]
    async with open_site() as site:
        for shown, text in ((True, until + stop), (False, until), (None, until)):
            body = {"prompt": "Hi", "stop": stop, "include_stop_str_in_output": shown, "max_tokens": 90}
            status, answer = await site.post(COMPLETION, body)
            assert (status, answer["choices"][0]["text"]) == (200, text)
            events = await site.stream(COMPLETION, body)
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text


async def test_a_prompt_is_cut_to_its_last_tokens(open_site: OpenSite) -> None:
    async with open_site() as site:
        long = "a b " * CONTEXT
        tokens = site.tokenizer.encode(long, special_tokens=True)
        for keeps, kept in ((3, 3), (-1, CONTEXT - 5), (CONTEXT - 5, CONTEXT - 5)):
            body = {"prompt": long, "truncate_prompt_tokens": keeps, "max_tokens": 5}
            status, answer = await site.post(COMPLETION, {**body, "echo": True})
            assert (status, answer["usage"]["prompt_tokens"]) == (200, kept)
            assert site.manager.submitted[-1].tokens == tokens[-kept:]
            assert answer["choices"][0]["text"].startswith(site.tokenizer.decode(tokens[-kept:], skip_special=True))
        status, answer = await site.post(CHAT, {"messages": HI, "truncate_prompt_tokens": 4})
        assert (status, answer["usage"]["prompt_tokens"]) == (200, 4) and prompt_of(site) == "ant\n"
        short = {"prompt": "Hi", "truncate_prompt_tokens": -1, "max_tokens": 5}
        assert (await site.post(COMPLETION, short))[0] == 200 and prompt_of(site).endswith("Hi")


@pytest.mark.parametrize(
    ("keeps", "param"),
    [
        (CONTEXT + 1, "truncate_prompt_tokens"),
        (-2, "truncate_prompt_tokens"),
        (CONTEXT, "prompt"),
        (CONTEXT - 2, "max_tokens"),
        (0, "prompt"),
    ],
)
async def test_a_prompt_that_cannot_be_cut_so(open_site: OpenSite, keeps: int, param: str) -> None:
    async with open_site() as site:
        body = {"prompt": "a b " * CONTEXT, "truncate_prompt_tokens": keeps, "max_tokens": 5}
        status, answer = await site.post(COMPLETION, body)
        assert (status, answer["error"]["param"]) == (400, param)


async def test_what_is_tokenised_to_be_cut_is_bounded(open_site: OpenSite) -> None:
    async with open_site(max_request_work=2000) as site:
        status, answer = await site.post(COMPLETION, {"prompt": "a b " * 5000, "truncate_prompt_tokens": 3})
        assert status == 400 and "gateway.max_request_work" in answer["error"]["message"]
