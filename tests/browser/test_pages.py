"""The pages in a real browser: they show what they are told, as text, on any screen, by keyboard, and within bounds."""

from __future__ import annotations

import asyncio

import pytest

from tests.browser.chromium import Tab, binary
from tests.browser.recorded import ENDED, MARKUP, Recorded, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(binary() is None, reason="no Chromium here: apt-get install chromium-headless-shell"),
]

TEXT = "document.body.innerText"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
ENTER = 13


async def shown(tab: Tab, url: str) -> None:
    await tab.size(1440, 900)
    await tab.open(url)
    await tab.until("document.querySelector('#workers canvas') && document.querySelector('#list table')")


async def test_everything_that_is_reported_is_shown_as_text(tab: Tab) -> None:
    async with served(Recorded()) as url:
        await shown(tab, url)
        await tab.until("document.querySelector('#life .stages')")  # a request was chosen for whom nobody chose
        text = await tab.evaluate(TEXT)
        for part in (
            "prefill-0",
            "decode-0",
            "not ready",
            "GPU 0 is there and unused",
            "infeasible",
            "real-time",
            MARKUP,
        ):
            assert part in text, part
        assert await tab.evaluate("document.querySelectorAll('#pipeline .node').length") == 7
        assert await tab.evaluate("document.querySelectorAll('#queue .column').length") == 3
        assert await tab.evaluate("document.querySelectorAll('img').length") == 1  # the page's own
        assert await tab.evaluate("document.title") == "Cohort"
        assert await tab.evaluate("document.querySelector('#chat').hidden")  # no address that a browser may open
        assert tab.errors == []


async def test_latencies_come_first_with_axes_their_slo_and_a_cursor(tab: Tab) -> None:
    recorded = Recorded()
    async with served(recorded) as url:
        await shown(tab, url)
        before = "document.querySelector('#charts').compareDocumentPosition(document.querySelector('#pipeline'))"
        assert await tab.evaluate(before) == 4  # the pipeline follows
        await tab.until("document.querySelectorAll('.plot polyline').length > 20")
        text = await tab.evaluate("document.querySelector('#charts').innerText")
        for part in (
            "TTFT · real-time",
            "TPOT · real-time",
            "SLO 2.00 s",
            "SLO 200 ms",
            "p50 ",
            "p99 ",
            "now",
            "−1 min",
        ):
            assert part in text, part
        await tab.until("document.querySelector('#tiles').innerText.includes('queue full')")
        figures = await tab.evaluate("document.querySelector('#tiles').innerText")
        assert "queue full" in figures and "TTFT p50" in figures and "25 %" in figures
        assert "Refused in the last minute: " in await tab.evaluate("document.querySelector('#decisions').innerText")
        when = "document.querySelector('.chart .when').textContent"
        await tab.until("document.querySelector('.plot').focus() || document.querySelector('.plot:focus')")
        for _ in range(100):  # until a second or two of history are there
            await tab.press("ArrowLeft", 37)
            if (await tab.evaluate(when)).endswith("ago"):
                break
            await asyncio.sleep(0.1)
        assert (await tab.evaluate(when)).endswith("ago")
        await tab.evaluate("new Promise(done => setTimeout(done, 2500))")  # drawn anew since
        assert (await tab.evaluate(when)).endswith("ago")
        assert await tab.evaluate("document.querySelector('.plot:focus') !== null")
        await tab.evaluate("document.querySelector('[data-span=\"3600\"]').click()")
        for _ in range(100):
            if recorded.history_s == 3600.0:
                break
            await tab.evaluate("new Promise(done => setTimeout(done, 100))")
        assert recorded.history_s == 3600.0
        assert tab.errors == []


async def test_a_worker_without_work_stands_by(tab: Tab) -> None:
    async with served(Recorded(many=0)) as url:
        await shown(tab, url)
        # Of the first heartbeat alone nothing has grown yet.
        await tab.until("document.querySelector('#workers').innerText.split('warm standby').length === 2")
        text = await tab.evaluate("document.querySelector('#workers').innerText")
        assert "no request was placed here in the last minute" in text


async def test_drafts_plans_and_managers_that_stand_by_are_shown(tab: Tab) -> None:
    async with served(Recorded(standbys=2)) as url:
        await shown(tab, url)
        await tab.until(
            "document.querySelector('#decisions table') && document.querySelectorAll('.process').length > 7"
        )
        text = await tab.evaluate(TEXT)
        for part in (
            "75 % right, 4.00 tokens a step and row, since its start · 40 rows in all",
            "0 % right, 1.00 tokens a step and row",
            "not judged yet",
            "then 97%, stands",
            f"no device is free {MARKUP}",
            "ready, leads",
            "ready, stands by",
            "manager leads",
        ):
            assert part in text, part
        assert await tab.evaluate("document.querySelectorAll('#decisions .chip.warn').length") == 1  # what failed
        assert await tab.evaluate("document.querySelectorAll('#pipeline .node').length") == 7
        assert await tab.evaluate(OVERFLOW) == 0
        assert tab.errors == []


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (820, 1100), (390, 844)])
async def test_nothing_sticks_out_of_the_screen(tab: Tab, width: int, height: int) -> None:
    async with served(Recorded(many=60)) as url:
        await shown(tab, url)
        await tab.size(width, height, phone=width < 600)
        await tab.until(f"document.querySelector('#pipeline svg').getBoundingClientRect().width <= {width}")
        assert await tab.evaluate(OVERFLOW) == 0
        # In the picture: every node's text lies within its box.
        outside = """[...document.querySelectorAll('#pipeline .node')].flatMap(node => {
            const box = node.querySelector('rect.box').getBoundingClientRect();
            return [...node.querySelectorAll('text')].filter(text => {
                const at = text.getBoundingClientRect();
                return at.left < box.left - 1 || at.right > box.right + 1 || at.bottom > box.bottom + 2; })
                .map(text => text.textContent); })"""
        assert await tab.evaluate(outside) == []


async def test_a_dead_process_is_shown_as_such(tab: Tab) -> None:
    recorded = Recorded()
    async with served(recorded) as url:
        await shown(tab, url)
        recorded.down.add("decode-0")
        await tab.until("document.querySelector('#pipeline .node.down')", 20.0)
        assert "down" in await tab.evaluate("document.querySelector('#health').textContent")
        assert (await tab.evaluate("document.title")).startswith("(1 down)")
        await tab.until("document.querySelectorAll('#workers canvas').length === 1")


async def test_a_request_is_chosen_by_keyboard_and_kept_in_the_address(tab: Tab) -> None:
    async with served(Recorded()) as url:
        await shown(tab, url)
        await tab.evaluate("document.querySelector('#find-id').focus()")
        await tab.call("Input.insertText", text=MARKUP)
        await tab.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r", windowsVirtualKeyCode=ENTER)
        await tab.until(f"document.querySelector('#life-note').textContent === {MARKUP!r}")
        assert "request=" in await tab.evaluate("location.hash")
        await tab.until("document.querySelector('#life .stages')")
        pick = f"document.querySelector('[data-key=\"r:{ENDED}\"]')"
        await tab.evaluate(f"{pick}.focus()")
        await tab.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r", windowsVirtualKeyCode=ENTER)
        await tab.until(f"document.querySelector('#life-note').textContent === '{ENDED}'")
        await tab.until(f"{pick}.getAttribute('aria-pressed') === 'true'")
        assert await tab.evaluate(f"document.activeElement === {pick}")  # the list was drawn anew since
        assert await tab.evaluate("document.querySelector('tr.chosen') !== null")


async def test_a_paused_page_asks_nothing(tab: Tab) -> None:
    recorded = Recorded()
    async with served(recorded) as url:
        await shown(tab, url)
        await tab.evaluate("document.querySelector('#pause').click()")
        await tab.until("document.querySelector('#pause').getAttribute('aria-pressed') === 'true'")
        for _ in range(50):  # the server notices with its next write
            if not recorded.monitor.live_views._viewers:
                break
            await tab.evaluate("new Promise(done => setTimeout(done, 100))")
        assert recorded.monitor.live_views._viewers == []
        assert await tab.evaluate("document.querySelector('#pause').textContent") == "Resume"
        before = recorded.looks
        await tab.evaluate("new Promise(done => setTimeout(done, 1500))")
        assert recorded.looks == before
        await tab.evaluate("document.querySelector('#pause').click()")
        await tab.evaluate("new Promise(done => setTimeout(done, 1500))")
        assert recorded.looks > before


async def test_colours_follow_the_scheme_and_motion_the_wish(tab: Tab) -> None:
    async with served(Recorded()) as url:
        await shown(tab, url)
        ground = "getComputedStyle(document.body).backgroundColor"
        light = await tab.evaluate(ground)
        moving = "getComputedStyle(document.querySelector('#pipeline .edge.flows')).animationName"
        await tab.until("document.querySelector('#pipeline .edge.flows')")
        assert await tab.evaluate(moving) == "none"
        await tab.size(1440, 900, dark=True, still=False)
        assert await tab.evaluate(ground) != light
        assert await tab.evaluate(moving) == "flow"


async def test_thousands_of_requests_and_blocks_are_drawn(tab: Tab) -> None:
    async with served(Recorded(many=5000)) as url:
        await shown(tab, url)
        assert await tab.evaluate("document.querySelectorAll('*').length") < 6000
        heights = "[...document.querySelectorAll('#workers canvas')].map(canvas => canvas.clientHeight)"
        assert all(20 < height <= 220 for height in await tab.evaluate(heights))
        assert tab.errors == []
