"""The page of the API in a real browser: it reads well on any screen, and its requests can be sent."""

from __future__ import annotations

import pytest

from tests.browser.chromium import Tab, binary
from tests.browser.recorded import MARKUP
from tests.browser.test_pages import OVERFLOW, TEXT
from tests.services.gateway.conftest import OpenSite, model_dir, open_site  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(binary() is None, reason="no Chromium here: apt-get install chromium-headless-shell"),
]


async def told(tab: Tab, operation: str, fields: dict[str, str]) -> str:
    """What is shown for a request with these fields, when its answer has ended."""
    form = f"document.querySelector('#{operation} form')"
    for name, value in fields.items():
        await tab.evaluate(f"{form}.elements[{name!r}].value = {value!r}")
    await tab.evaluate(f"{form}.requestSubmit()")
    await tab.until(f"!{form}.querySelector('button').disabled")
    return str(await tab.evaluate(f"{form}.querySelector('output').textContent"))


async def test_requests_are_tried_from_the_page(tab: Tab, open_site: OpenSite) -> None:  # noqa: F811
    async with open_site(f"A reply {MARKUP}", api_keys=("secret",)) as site:
        await tab.size(390, 844, phone=True)
        await tab.open(f"{site.url}/docs#createChatCompletion")
        await tab.until("document.querySelector('#createChatCompletion').open")
        await tab.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        text = await tab.evaluate(TEXT)
        assert "`" not in text and "number ≥ 0 ≤ 2" in text
        assert await tab.evaluate(OVERFLOW) == 0
        light = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
        await tab.size(1440, 900, dark=True)
        assert await tab.evaluate("getComputedStyle(document.body).backgroundColor") != light
        assert tab.errors == []
        assert (await told(tab, "listModels", {})).startswith("401 ")
        await tab.evaluate("document.querySelector('#key').value = 'secret'")
        assert (await told(tab, "getModel", {"name": "tiny"})).startswith("200 ")
        assert (await told(tab, "getModel", {"name": "a/../b?"})).startswith("404 ")
        body = '{"messages": [{"role": "user", "content": "Hi"}]}'
        whole = await told(tab, "createChatCompletion", {"body": body, "x-cohort-class": "be"})
        assert f'"content": "A reply {MARKUP}"' in whole and site.manager.submitted[-1].traffic_class == "be"
        streamed = await told(tab, "createChatCompletion", {"body": body.replace("{", '{"stream": true, ', 1)})
        assert streamed.startswith("200 ") and streamed.endswith("data: [DONE]\n\n")
        assert (await told(tab, "listFiles", {"limit": "0"})).startswith("400 ")
        assert await tab.evaluate("document.querySelectorAll('img').length") == 1  # the page's own
