"""A headless Chromium for tests of the pages, driven over its DevTools protocol.

No driver and no further package: aiohttp's websocket client, and whichever Chromium the machine has. `CHROMIUM_BINARY`
names one; without any the tests are skipped. Also a program: `python -m tests.browser.chromium URL FILE.png` makes a
picture of a page, as those in docs/images were made.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
START_S = 60.0
CALL_S = 60.0


def binary() -> str | None:
    """The Chromium of this machine; None where there is none."""
    named = os.environ.get("CHROMIUM_BINARY", "")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page. `errors`: what its scripts threw, wrote to the console as errors, or were forbidden by its policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def read(self) -> None:
        """Until the connection ends; hosted by `page`."""
        async for message in self._socket:
            said = json.loads(message.data)
            waiting = self._answers.pop(said.get("id", 0), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(said)
            elif said.get("method") == "Runtime.exceptionThrown":
                details = said["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                entry = said["params"]["entry"]
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        said = await asyncio.wait_for(answer, CALL_S)
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']}")
        return dict(said["result"])

    async def size(
        self, width: int, height: int, *, dark: bool = False, still: bool = True, phone: bool = False
    ) -> None:
        """`still`: as for people who asked for reduced motion."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        said = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise RuntimeError(said["exceptionDetails"].get("exception", {}).get("description", "thrown"))
        return said["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 30.0) -> None:
        """Until the expression is true."""
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(RuntimeError):  # the page is being replaced
                    if await self.evaluate(f"Boolean({expression})"):
                        return
                await asyncio.sleep(0.1)

    async def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def picture(self, file: Path, *, whole: bool = False) -> None:
        """`whole`: all of the page, not what fits the screen."""
        said = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(said["data"]))


@contextmanager
def chromium() -> Iterator[str]:
    """A Chromium of its own, by its address; it ends with the block. Raises `FileNotFoundError` without one."""
    path = binary()
    if path is None:
        raise FileNotFoundError("no Chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [
                path,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--hide-scrollbars",
                "--remote-debugging-port=0",
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the command may be a script around the browser, which has children of its own
        )
        try:
            yield f"http://127.0.0.1:{_port(Path(folder) / 'DevToolsActivePort', process)}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@asynccontextmanager
async def page(address: str) -> AsyncIterator[Tab]:
    """An empty page of that Chromium; it is closed with the block."""
    async with aiohttp.ClientSession(address) as session:
        async with session.put("/json/new?about:blank") as answer:
            made = await answer.json()
        async with session.ws_connect(made["webSocketDebuggerUrl"], max_msg_size=1 << 26) as socket:
            tab = Tab(socket)
            reading = asyncio.create_task(tab.read())
            for domain in ("Page", "Runtime", "Log"):
                await tab.call(f"{domain}.enable")
            await tab.call("Emulation.setFocusEmulationEnabled", enabled=True)  # else nothing has the focus
            yield tab
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        async with session.get(f"/json/close/{made['id']}"):
            pass


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline_s = time.monotonic() + START_S
    while not (lines := _lines(file)):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"Chromium does not answer, or ended with {process.returncode}")
        time.sleep(0.05)
    return int(lines[0])


def _lines(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


async def _main(address: str, options: argparse.Namespace) -> None:
    async with page(address) as tab:
        await tab.size(options.width, options.height, dark=options.dark, phone=options.width < 600)
        await tab.open(options.url)
        await asyncio.sleep(options.wait)
        if options.script:
            await tab.evaluate(options.script)
            await asyncio.sleep(1.5)
        await tab.picture(options.file, whole=options.whole)
        for error in tab.errors:
            print("error on the page:", error)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("file", type=Path)
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--whole", action="store_true", help="the whole page, not what fits the screen")
    parser.add_argument("--wait", type=float, default=5.0, help="seconds before the picture")
    parser.add_argument("--script", default="", help="JavaScript to run before it")
    with chromium() as started:
        asyncio.run(_main(started, parser.parse_args()))
