"""A model's folder with a hostile chat template, or messages that make a harmless one work for ever.

Attacks: nested loops without end; one operation that needs gigabytes or hours of a single instruction of the
interpreter; a constant of that size, computed while the template is compiled; a prompt of hundreds of megabytes; the
gateway's environment, where API keys may be. In each the event loop goes on and the next chat is answered.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cohort.common.errors import ModelError, RequestError
from cohort.services.gateway import bounds, service
from cohort.services.gateway.text import bounded_process
from cohort.services.gateway.text.bounded_process import ANSWER, Answers, BoundedProcess
from cohort.services.gateway.text.chat_template import ChatTemplate
from cohort.services.gateway.text.template_process import ChatRenderer, TemplateLimits
from cohort.services.gateway.text.tokenizer import Tokenizer
from tests.examples import another_of_its_kind
from tests.services.gateway import tiny_model
from tests.services.gateway.conftest import OpenSite

LIMITS = TemplateLimits(cpu_s=0.3, memory_bytes=64 << 20)
CHAT = [{"role": "user", "content": "Hi"}]
ATTACK = [{"role": "user", "content": "attack"}]
WHEN = "{% if messages[0].content == 'attack' %}"
THEN = "{% endif %}{{ messages[0].content }}"

# Each ends by itself only after minutes, or needs gigabytes; none leaves the sandbox.
LOOP, END = "{% for i in range(99999) %}", "{% endfor %}"
NESTED = LOOP * 3 + END * 3
POWER = "{% set n = messages | length %}{% set x = (n * 7) ** (n * 9999999) %}{{ x % 10 }}"
REPEATED = "{% set n = messages | length %}{{ ('a' * (n * 3000000000)) | length }}"
GROWING = "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
JUSTIFIED = "{{ messages[0].content.ljust(3000000000) | length }}"
FORMATTED = "{{ '{:>3000000000}'.format(messages[0].content) | length }}"
SLOW = "{% for i in range(8000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"  # a second, and it ends
LONG = "{{ messages[0].content * 3000000 }}"


def renderer(template: str, limits: TemplateLimits = LIMITS) -> ChatRenderer:
    return ChatRenderer(template, {}, limits)


def render(chats: ChatRenderer, chat: list[dict[str, str]]) -> str:
    return chats.render(chat, add_generation_prompt=True, variables={})


@pytest.mark.parametrize(
    ("attack", "limit", "figure"),
    [
        (NESTED, "processor time", "0.3 s"),
        (POWER, "processor time", "0.3 s"),
        (REPEATED, "memory", "67108864"),
        (GROWING, "memory", "67108864"),
        pytest.param(JUSTIFIED, "memory", "67108864", marks=another_of_its_kind()),
        pytest.param(FORMATTED, "memory", "67108864", marks=another_of_its_kind()),
        (LONG, "made a prompt of", "8388608"),
    ],
    ids=["nested", "power", "repeated", "growing", "justified", "formatted", "long"],
)
async def test_a_templates_resources_are_bounded(
    attack: str, limit: str, figure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One attack in the middle of other chats: refused with the limit's name; before and after it all is well."""
    # Seconds of a processor are judged here, not how soon a busy machine gives them.
    monkeypatch.setattr(bounded_process, "_WAIT_FACTOR", 1000.0)
    chats = renderer(f"{WHEN}{attack}{THEN}")
    assert render(chats, CHAT) == "Hi"
    process, turns = chats._short._process, 0
    assert process is not None

    async def loop_goes_on() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    os.kill(process.pid, signal.SIGSTOP)  # it does not end before the loop was seen to go on
    other = asyncio.create_task(loop_goes_on())
    rendering = asyncio.create_task(chats.render_soon(ATTACK, add_generation_prompt=True, variables={}))
    while turns <= 3:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert not rendering.done()
    os.kill(process.pid, signal.SIGCONT)
    with pytest.raises(RequestError) as caught:
        await rendering
    other.cancel()
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert limit in caught.value.message and figure in caught.value.message
    assert render(chats, CHAT) == "Hi"


def test_constants_are_computed_under_the_same_limits() -> None:
    """Jinja computes them while it compiles, so compilation cannot happen in the gateway."""
    with pytest.raises(ModelError, match="processor time"):
        renderer("{{ 7 ** 99999999 % 10 }}").warm()
    chats = renderer("{{ 'a' * 3000000000 }}")
    with pytest.raises(RequestError, match="bytes of memory"):
        render(chats, CHAT)


def test_a_template_that_cannot_be_compiled_is_an_error_at_start() -> None:
    with pytest.raises(ModelError, match="TemplateSyntaxError"):
        renderer("{% for %}").warm()


def test_a_template_sees_nothing_of_the_gateways_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the sandbox there is a second wall: what is not in the process cannot be told."""
    monkeypatch.setenv("COHORT_API_KEY", "secret")
    chats = renderer("{{ messages[0].content }}")
    chats.warm()
    environments = [
        Path(f"/proc/{child}/environ").read_bytes()
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if b"template_process" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    assert environments and all(b"COHORT_API_KEY" not in environment for environment in environments)


def test_a_process_that_is_killed_is_started_anew() -> None:
    chats = renderer("{{ messages[0].content }}")
    assert render(chats, CHAT) == "Hi"
    process = chats._short._process
    assert process is not None
    process.kill()
    process.wait()
    assert render(chats, CHAT) == "Hi"


@pytest.mark.parametrize("letters", [2, 1 << 20])
async def test_one_that_hangs_is_ended_whatever_its_chat_is_long(letters: int) -> None:
    """A pipe takes 64 KiB that nobody reads; the rest must not be waited for without end."""
    chats = renderer("{{ messages[0].content | length }}")
    assert render(chats, [{"role": "user", "content": "x" * letters}]) == str(letters)
    process = (chats._short if letters == 2 else chats._long)._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    render_it = asyncio.to_thread(render, chats, [{"role": "user", "content": "y" * letters}])
    try:
        with pytest.raises(RequestError, match="no answer in time") as stopped:
            await asyncio.wait_for(render_it, 20)
        assert stopped.value.status == 503 and process.returncode == -signal.SIGKILL
    finally:
        if process.returncode is None:
            process.kill()
    assert render(chats, [{"role": "user", "content": "z" * letters}]) == str(letters)


def test_processes_that_end_leave_no_descriptor_open() -> None:
    """Each hostile chat ends one. Their pipes added up until the gateway could open nothing any more."""
    chats = renderer(f"{WHEN}{GROWING}{THEN}")
    gc.collect()  # what other tests left is not to end in between
    open_at = []
    for _ in range(3):
        with pytest.raises(RequestError):
            render(chats, ATTACK)
        assert render(chats, CHAT) == "Hi"
        process = chats._short._process
        assert process is not None
        process.kill()  # and one that ends while nothing is asked of it
        process.wait()
        assert render(chats, CHAT) == "Hi"
        open_at.append(len(os.listdir("/proc/self/fd")))
    assert open_at == [open_at[0]] * 3


def test_a_chat_whose_process_is_killed_from_outside_is_rendered_all_the_same() -> None:
    """As by the system, when it is short of memory: not the chat's fault, so no 400."""
    chats = renderer(f"{WHEN}{SLOW}{THEN}", TemplateLimits(cpu_s=20.0, memory_bytes=64 << 20))
    assert render(chats, CHAT) == "Hi"
    process = chats._short._process
    assert process is not None
    idle = cpu_ticks(process.pid)
    with ThreadPoolExecutor(1) as thread:
        rendering = thread.submit(render, chats, ATTACK)
        while cpu_ticks(process.pid) < idle + 5:
            assert not rendering.done()
            time.sleep(0.01)
        process.kill()
        assert rendering.result(60) == "attack"
    assert chats._short._process is not process


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_no_process_outlives_its_renderer() -> None:
    chats = renderer("{{ messages[0].content }}")
    assert render(chats, CHAT) == "Hi"
    process = chats._short._process
    assert process is not None
    del chats
    assert process.returncode is not None


ECHO = "{{ messages[0].content | tojson }}|{{ extra | tojson }}"


@pytest.fixture(scope="module")
def echo() -> ChatRenderer:
    return renderer(ECHO)


@pytest.mark.parametrize("value", [2**70, -(2**63), 1.5, True, "\x00é🦊", [], {"a": [None, {}]}], ids=repr)
def test_values_arrive_as_they_were_sent(echo: ChatRenderer, value: object) -> None:
    chat = [{"role": "user", "content": value}]
    here = ChatTemplate(ECHO, {}).render(chat, add_generation_prompt=True, variables={"extra": value})
    assert echo.render(chat, add_generation_prompt=True, variables={"extra": value}) == here


async def test_chats_wait_in_turn_of_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key's chats, however many and slow, delay another's by one; beyond their bound they are refused."""
    monkeypatch.setattr(bounds, "BOUNDS", bounds.Bounds(chats_waiting=3))
    rendered, gate = [], threading.Event()

    def call_together(_: BoundedProcess, questions: Sequence[bytes]) -> Answers:
        assert gate.wait(60)
        rendered.append(json.loads(questions[0])["messages"][0]["content"])
        return [(ANSWER, b""), *[None] * (len(questions) - 1)]

    monkeypatch.setattr(BoundedProcess, "call_together", call_together)
    chats = renderer("")

    def soon(owner: str, text: str) -> asyncio.Task[str]:
        chat = [{"role": "user", "content": text}]
        rendering = chats.render_soon(chat, add_generation_prompt=True, variables={}, owner=owner)
        return asyncio.create_task(rendering)

    waiting = [soon("alice", text) for text in "abcd"]  # one of them is under way
    await asyncio.sleep(0)
    waiting.append(soon("bob", "B"))
    with pytest.raises(RequestError, match=r"busy with chats.* 3 of this client's wait, and at most 3") as refused:
        await soon("alice", "e")
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1.0)
    gate.set()
    await asyncio.gather(*waiting)
    assert sorted(rendered) == list("Babcd") and "B" in rendered[:3]


async def test_a_gateway_serves_on_beside_a_hostile_template(
    open_site: OpenSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "TemplateLimits", lambda: TemplateLimits(cpu_s=0.5))
    model = tiny_model.write_model(tmp_path / "m", template=f"{WHEN}{NESTED}{THEN}")
    async with open_site(model=model) as site:
        body = {"max_tokens": 4, "messages": CHAT}
        assert (await site.post("/v1/chat/completions", body))[0] == 200
        attack = asyncio.create_task(site.post("/v1/chat/completions", {"max_tokens": 4, "messages": ATTACK}))
        await asyncio.sleep(0.05)
        started_s = time.monotonic()
        assert (await site.post("/v1/completions", {"prompt": "x", "max_tokens": 4}))[0] == 200
        assert not attack.done() and time.monotonic() > started_s
        status, answer = await attack
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "0.5 s of processor time" in answer["error"]["message"]
        assert (await site.post("/v1/chat/completions", body))[0] == 200


def test_a_prompt_has_an_eighth_of_the_memory(tmp_path: Path) -> None:
    model = tiny_model.write_model(tmp_path / "m", template="{{ messages[0].content * 1000000 }}")
    tokenizer = Tokenizer(model, TemplateLimits(cpu_s=5.0, memory_bytes=32 << 20))
    with pytest.raises(RequestError, match="4194304"):
        tokenizer.render_chat(ATTACK, add_generation_prompt=True, variables={})
