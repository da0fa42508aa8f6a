"""One Chromium for all pages of a run's process: to start it takes longer than most tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.browser.chromium import Tab, chromium, page


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    with chromium() as started:
        yield started


@pytest.fixture
async def tab(address: str) -> AsyncIterator[Tab]:
    async with page(address) as opened:
        yield opened
