"""The chat page in a real browser, from a gateway with a scripted cluster: what is sent, drawn, kept and refused."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from cohort.common.messages import Placed, TokenUpdate
from cohort.common.types import FinishReason
from tests.browser.chromium import Tab, binary
from tests.browser.recorded import MARKUP
from tests.browser.test_pages import ENTER, OVERFLOW
from tests.services.gateway.conftest import OpenSite, Site, eventually, model_dir, open_site  # noqa: F401
from tests.services.gateway.generation.test_reasoning import THOUGHT, thinking  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(binary() is None, reason="no Chromium here: apt-get install chromium-headless-shell"),
]
SAID = "[...document.querySelectorAll('.turn.assistant')].at(-1)"
DONE = "!document.querySelector('#send').hidden && document.querySelector('.turn')"
HOSTILE = f"""# {MARKUP}

**bold {MARKUP}** [*run*](javascript:alert(1)) [data](data:text/html,x) ![x](javascript:alert(2)) <javascript:alert(3)>

````md
```html
{MARKUP}
```
<script>document.title = 1</script>
````

- [out](https://example.org/?a="b') and `</code>{MARKUP}`

| {MARKUP} | b |
|---|---|
| <iframe src=javascript:alert(4)> | \\*plain\\* |

```{MARKUP}
never closed: </code></pre>{MARKUP}"""


async def opened(tab: Tab, site: Site, *, phone: bool = False) -> None:
    await tab.size(*((390, 844) if phone else (1280, 860)), phone=phone)
    await tab.open(f"{site.url}/chat")
    await tab.until("document.querySelector('#model').options.length")


async def say(tab: Tab, text: str) -> None:
    await tab.evaluate("document.querySelector('#words').focus()")
    await tab.call("Input.insertText", text=text)
    await tab.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r", windowsVirtualKeyCode=ENTER)


async def answered(tab: Tab, text: str) -> str:
    """All text of the answer to `text`, which ends."""
    await say(tab, text)
    await tab.until(DONE)
    return str(await tab.evaluate(f"{SAID}.innerText"))


def prompt(site: Site) -> str:
    return site.tokenizer.decode(site.manager.submitted[-1].tokens, skip_special=False)


async def test_a_key_is_asked_for_and_the_question_given_back(tab: Tab, open_site: OpenSite) -> None:  # noqa: F811
    async with open_site("A reply", api_keys=("secret",)) as site:
        await opened(tab, site, phone=True)
        assert await tab.evaluate("document.querySelector('#model').textContent") == "asks for an API key"
        assert await tab.evaluate(OVERFLOW) == 0
        assert "API key" in await answered(tab, "Hello")
        assert await tab.evaluate("document.querySelector('#words').value") == "Hello"
        await tab.evaluate("document.querySelector('#key').value = 'secret'")
        assert (await answered(tab, " again")).startswith("A reply")
        assert await tab.evaluate("document.querySelectorAll('.turn.user').length") == 2
        assert "Hello again" in prompt(site) and prompt(site).count("user\n") == 1


async def test_workers_best_effort_and_a_cut_are_shown(tab: Tab, open_site: OpenSite) -> None:  # noqa: F811
    async with open_site() as site:
        await opened(tab, site)
        assert "worker-0" in await answered(tab, "Hi")
        assert "best effort" not in await tab.evaluate(f"{SAID}.innerText")
        site.manager.place = False
        await say(tab, "Hi")
        await eventually(lambda: len(site.manager.submitted) == 2)
        request = site.manager.submitted[1]
        site.manager.bus.send("gateway", Placed(request.attempt, ["worker-0"], 0.0, "test", True, 3.25))
        last = TokenUpdate(request.attempt, request.prompt_tokens, [40], finish=FinishReason.LENGTH)
        site.manager.workers[0].send([last])
        await tab.until(DONE)
        told = await tab.evaluate(f"{SAID}.innerText")
        assert "worker-0" in told and "served as best effort" in told and "cut off" in told
        assert tab.errors == []


async def test_markup_of_a_model_stays_text(tab: Tab, open_site: OpenSite, thinking: Path) -> None:  # noqa: F811
    async with open_site(HOSTILE, model=thinking) as site:
        await opened(tab, site)
        text = await answered(tab, MARKUP)
        for part in (
            "[*run*](javascript:alert(1))",
            "<script>document.title = 1</script>",
            "*plain*",
            "never closed: <",
        ):
            assert part.replace("*run*", "run") in text, part
        assert text.count(MARKUP) == HOSTILE.count(MARKUP) - 1  # the one where a language is named is dropped
        assert await tab.evaluate("document.querySelectorAll('main :is(img, script, iframe, svg, object)').length") == 0
        assert await tab.evaluate("[...document.querySelectorAll('.turn a')].map(a => [a.textContent, a.href])") == [
            ["out", "https://example.org/?a=%22b%27"]
        ]
        assert await tab.evaluate("[...document.querySelectorAll('.code pre')].map(each => each.textContent)") == [
            f"```html\n{MARKUP}\n```\n<script>document.title = 1</script>",
            f"never closed: </code></pre>{MARKUP}",
        ]
        assert await tab.evaluate("document.title") == "Chat · Cohort" and await tab.evaluate(OVERFLOW) == 0
        assert tab.errors == []


DRAWN = (
    (
        "1. a\n   - b\n\n     c\n2. d\n\ne\nf",
        "<ol><li><p>a</p><ul><li><p>b</p><p>c</p></li></ul></li><li><p>d</p></li></ol><p>e\nf</p>",
    ),
    ("- a\n\n  ```\n  x\n    y\n  ```\n- b", "<ul><li><p>a</p>CODE</li><li><p>b</p></li></ul>"),
    ("2 * 3 * 4, a_b_c, ***d***", "<p>2 * 3 * 4, a_b_c, <strong><em>d</em></strong></p>"),
    ("``a`b`` [c **d**](mailto:e@f)", "<p><code>a`b</code> <a>c <strong>d</strong></a></p>"),
    (
        "# a\n> b\n> > c\n\n---\n3) d",
        "<h3>a</h3><blockquote><p>b</p><blockquote><p>c</p></blockquote></blockquote><hr><ol><li><p>d</p></li></ol>",
    ),
    (
        "a\n| b | c |\n|:-|-:|\n| `d` | e",
        "<p>a</p><div><table><thead><tr><th>b</th><th>c</th></tr></thead><tbody><tr><td><code>d</code></td><td>e</td></tr></tbody></table></div>",
    ),
)
CODE = "<div><div></div><pre><code>x\n  y</code></pre></div>"
MARKS = ("*", "**a ", "`", "``` ", "[", "> ", "- ", "#", "# ", "|-", "| ", "\\", "[a](https://", "\n-", "  ")


async def test_markdown_is_drawn_and_never_takes_long(tab: Tab, open_site: OpenSite) -> None:  # noqa: F811
    async with open_site() as site:
        await opened(tab, site)
        draw = "import('/chat/markdown.js').then(({ markdown }) => markdown(%s).map(each => each.outerHTML).join(''))"
        for text, html in DRAWN:
            drawn = await tab.evaluate(draw % json.dumps(text))
            bare = re.sub(r"<(\w+)[^>]*>", r"<\1>", re.sub(r"<button.*?</button>", "", drawn))
            assert bare == html.replace("CODE", CODE), text
        for mark in MARKS:  # as long as a paragraph may be whose inner marks are looked for
            await tab.evaluate(draw % json.dumps(mark * (7900 // len(mark))))


async def test_settings_are_sent_and_a_reload_keeps_them_and_the_conversation(
    tab: Tab,
    open_site: OpenSite,  # noqa: F811
    thinking: Path,  # noqa: F811
) -> None:
    async with open_site(f"<think>{THOUGHT}</think>In **Köln**.", model=thinking) as site:
        await opened(tab, site)
        await tab.evaluate("document.querySelector('[popovertarget]').click()")
        for name, value in (("system", "Be brief."), ("temperature", "0"), ("tokens", "77")):
            await tab.evaluate(f"document.querySelector('#{name}').value = {value!r}")
        assert "In Köln." in await answered(tab, "Where?")
        request = site.manager.submitted[-1]
        assert (request.sampling.temperature, request.sampling.max_tokens) == (0.0, 77)
        assert "system\nBe brief." in prompt(site)
        folded = (
            "[...document.querySelectorAll('.turn details')].map(each => [each.open, each.children[1].textContent])"
        )
        assert await tab.evaluate(folded) == [[False, THOUGHT]]
        await tab.call("Page.reload")
        await tab.until("document.querySelector('.turn strong') && document.querySelector('#model').value")
        assert await tab.evaluate(folded) == [[False, THOUGHT]]
        assert "worker-0" in await tab.evaluate(f"{SAID}.innerText")
        await answered(tab, "And now?")
        assert "Where?" in prompt(site) and "In **Köln**." in prompt(site) and "Be brief." in prompt(site)
        assert THOUGHT not in prompt(site)
        await tab.evaluate("document.querySelector('#clear').click()")
        await tab.call("Page.reload")
        await tab.until("document.querySelector('.hello')")
        assert tab.errors == []


async def test_an_answer_is_stopped_copied_and_left(tab: Tab, open_site: OpenSite, thinking: Path) -> None:  # noqa: F811
    """The cluster is rid of a stopped answer; what was there of it is kept, also over a reload in its middle."""
    first = asyncio.Event()
    async with open_site("One **two**\n\n```\nthree\n```\n" * 9, model=thinking) as site:
        left = 25

        async def some() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                await first.wait()

        site.manager.gate = some
        await opened(tab, site)
        await say(tab, "Count")
        await tab.until(f"{SAID}.querySelector('.code')")
        await tab.evaluate("document.querySelector('#stop').click()")
        await tab.until(DONE)
        await eventually(site.nothing_left)
        assert "stopped" in await tab.evaluate(f"{SAID}.innerText")
        copied = "(navigator.clipboard.writeText = async text => { window.copied = text; }, {}.click(), window.copied)"
        buttons = "document.querySelector('.turn .copy')", "document.querySelector('.turn footer .copy')"
        texts: list[Any] = [await tab.evaluate(copied.replace("{}", each)) for each in buttons]
        assert texts[0] == "three" and texts[1].startswith("One **two**\n\n```\nthree")
        left = 25
        await say(tab, "Again")
        await tab.until(f"{SAID}.querySelector('.code')")
        await tab.call("Page.reload")
        await tab.until(f"document.querySelectorAll('.turn').length === 4 && {SAID}.innerText.includes('interrupted')")
        await eventually(site.nothing_left)
        first.set()
