"""Attack: work for nothing. A key beyond its limits sends bodies without end; a stranger looks for keys where they are
seen."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cohort.common.config import load_config
from cohort.common.keys.key_file import OwnLimits, editing, new_key
from cohort.common.machines.recorder import config_text
from cohort.common.process.metrics import TOKEN_HEADER
from cohort.services.gateway.keys.keyring import Keyring
from tests.services.gateway.conftest import OpenSite, Site, eventually, model_dir, open_site  # noqa: F401

ASK: dict[str, Any] = {"prompt": "x", "max_tokens": 4}
MEBIBYTE = 1 << 20


def add(path: Path, name: str, **limits: int) -> str:
    with editing(path) as held:
        held[0], _, secret = new_key(held[0], name, 1, rt=OwnLimits(**limits))
    return secret


async def test_a_prompt_beyond_the_limit_is_refused_before_it_is_offered(
    open_site: OpenSite,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys.json"
    headers = {"Authorization": f"Bearer {add(path, 'alice', tokens_per_minute=100)}"}
    async with open_site(keys={"file": str(path)}) as site:
        for body, status in (
            ({"prompt": [5] * 90, "max_tokens": 11}, 400),
            ({"prompt": [5] * 10, "max_tokens": 30, "n": 4}, 400),
            ({"prompt": [[5] * 40, [5] * 40], "max_tokens": 11}, 400),
            ({"prompt": [5] * 10, "max_tokens": 4, "best_of": 30}, 400),
        ):
            found, answer = await site.post("/v1/completions", body, headers=headers)
            assert (found, "tokens_per_minute" in answer["error"]["message"]) == (status, True), answer
        assert site.manager.submitted == []


async def test_many_at_once_get_no_more_than_the_limit(open_site: OpenSite, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "keys.json"
    headers = {"Authorization": f"Bearer {add(path, 'alice', tokens_per_day=50, concurrent_requests=30)}"}
    async with open_site(lambda request: [9] * 4, keys={"file": str(path)}) as site:
        results = await asyncio.gather(
            *(site.post("/v1/completions", {**ASK, "prompt": [5] * 6}, headers=headers) for _ in range(20))
        )
        assert sorted(status for status, _ in results) == [200] * 5 + [429] * 15
        await eventually(site.nothing_left)


def stored(folder: Path) -> bytes:
    """The database of usage, with its log."""
    return b"".join(each.read_bytes() for each in folder.glob("key-usage.sqlite3*"))


async def test_no_key_and_no_hash_is_to_be_seen_anywhere(open_site: OpenSite, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "keys.json"
    secret = add(path, "alice", requests_per_minute=2)
    digest = next(line for line in path.read_text(encoding="utf-8").splitlines() if '"hash"' in line).split('"')[3]
    async with open_site(keys={"file": str(path)}, api_keys=("very-plain",)) as site:
        told = []
        for key in (secret, secret, secret, "very-plain", secret + "x"):
            async with site.session.post(
                site.url + "/v1/completions", json=ASK, headers={"Authorization": f"Bearer {key}"}
            ) as response:
                told.append(await response.text() + str(response.headers))
        told.append(await site.monitors_metrics())
        told += [repr(request) for request in site.manager.submitted]
    usage = stored(tmp_path)
    assert b"alice" in usage and 'key="alice"' in told[5]
    for text in (*told, usage.decode("latin-1")):
        for private in (secret, secret.split("_", 2)[2], digest, "very-plain"):
            assert private not in text


async def test_strangers_get_no_series_that_names_a_key(open_site: OpenSite, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "keys.json"
    headers = {"Authorization": f"Bearer {add(path, 'alice', requests_per_minute=2)}"}
    async with open_site(keys={"file": str(path)}) as site:
        await site.post("/v1/completions", ASK, headers=headers)
        for shown in ({}, headers, {TOKEN_HEADER: "0" * 32}, {TOKEN_HEADER: "é"}, {TOKEN_HEADER: ""}):
            async with site.session.get(site.url + "/metrics", headers=shown) as response:
                text = await response.text()
            assert (response.status, "cohort_key_" in text, "alice" in text) == (200, False, False)
            assert "cohort_request_success_total" in text
        everything = await site.monitors_metrics()
        assert 'cohort_key_requests_total{instance="gateway",key="alice"' in everything
        families = [family.name for family in text_string_to_metric_families(everything)]
        assert len(families) == len(set(families))


def test_plain_keys_are_not_kept_by_the_ring() -> None:
    class Clock:
        def now_s(self) -> float:
            return 0.0

    secret = "plain-" + "k" * 20
    ring = Keyring(load_config(), (secret,), Clock(), None)  # type: ignore[arg-type]
    assert ring.find(secret) is not None and ring.find(secret + "x") is None and ring.find("") is None
    seen: list[Any] = [ring]
    known: set[int] = set()
    while seen:
        each = seen.pop()
        if id(each) in known or isinstance(each, type) or callable(each):
            continue
        known.add(id(each))
        assert each != secret
        seen += [inner for inner in gc.get_referents(each) if not isinstance(inner, type)]


def test_a_recording_names_no_key() -> None:
    config = load_config(overrides={"gateway": {"api_keys": ["very-secret", "more-secret"]}})
    text = config_text(config)
    assert "secret" not in text.replace("curve_secret_key_file", "") and config.shares_fairly
