from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.common.hub.fake_hub import FakeHub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hugging Face's cache of a test, empty; nothing of the user's."""
    folder = tmp_path / "hub"
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "COHORT_DOWNLOAD", "HF_HUB_ENABLE_HF_TRANSFER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path / "cohort"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return folder


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as started:
        monkeypatch.setenv("HF_ENDPOINT", started.url)
        path = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", started.url + path)
        monkeypatch.setattr(constants, "ENDPOINT", started.url)
        yield started
