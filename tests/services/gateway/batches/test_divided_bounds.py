"""Bounds of admission among the gateways of a port: together they hold what one would, and each serves what it must."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.config import Config, GatewayConfig, KeysConfig
from cohort.common.errors import RequestError
from cohort.common.policies.baselines import build_admission
from cohort.common.policies.interface import AdmissionLoad, Admit, Offer, Refuse
from cohort.common.types import Slo
from cohort.services.gateway import bounds
from cohort.services.gateway.batches.batch_quota import Quota
from cohort.services.gateway.batches.batch_store import BatchStore
from cohort.services.gateway.bounds import BOUNDS, Bounds
from cohort.services.gateway.http.request_bodies import most_in_flight
from tests.services.gateway.conftest import OpenSite

BOUND = st.integers(1, 10**7)


@given(st.integers(1, 60), BOUND, BOUND, BOUND, BOUND)
def test_parts_are_equal_and_none_is_lost(processes: int, requests: int, tokens: int, body: int, work: int) -> None:
    config = GatewayConfig(
        processes=processes,
        max_waiting_requests=requests,
        max_waiting_tokens=tokens,
        max_body_bytes=body,
        max_open_work=work,
        max_request_work=body,
    )
    for own, whole in ((config.own_waiting_requests, requests), (config.own_waiting_tokens, tokens)):
        assert whole <= processes * own < whole + processes
    # A body, a conversation as long and its response, of 128 bodies; the largest request, as far as one may be open.
    for own, whole, least in (
        (most_in_flight(config), BOUNDS.bodies * body, 4 * body),
        (config.own_open_work, work, min(body, work)),
    ):
        assert processes * own >= whole >= own >= least, "the largest one fits"
        assert own == least or processes * own < whole + processes
    if processes == 1:
        assert (most_in_flight(config), config.own_open_work) == (BOUNDS.bodies * body, work)


def test_what_waits_at_one_of_two_gateways_is_half() -> None:
    policy = build_admission(
        Config(gateway=GatewayConfig(processes=2, max_waiting_requests=9), keys=KeysConfig(owner_share=0.4))
    )

    def load(waiting: int, own: int = 0) -> AdmissionLoad:
        return AdmissionLoad(waiting, 0, 0, 1.0, 0, 0, owner_requests=own)

    plain, owned = (Offer(1, 1, 1.0, "rt", 0, Slo(), owner) for owner in ("", "a"))
    assert isinstance(policy.decide(0.0, plain, load(4)), Admit)
    assert isinstance(policy.decide(0.0, plain, load(5)), Refuse)
    refused = policy.decide(0.0, owned, load(2, 2))
    assert isinstance(refused, Refuse) and "5, this gateway's of 2" in refused.reason


def test_uploads_under_way_are_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "BOUNDS", Bounds(uploads=3))
    store = BatchStore(tmp_path / "batches.sqlite")
    quota = Quota(1 << 20, owner_share=1.0, gateways=2)
    for name in ("one", "two"):
        quota.begin_upload(store, name, "", 0)
    with pytest.raises(RequestError, match="2 files are being uploaded here, of 3 at 2 gateways") as caught:
        quota.begin_upload(store, "three", "", 0)
    assert caught.value.status == 429
    store.close()


async def test_more_choices_than_may_wait_at_one_gateway_are_a_400(open_site: OpenSite) -> None:
    body = {"prompt": "x", "max_tokens": 4, "n": 3}
    async with open_site(processes=2, max_waiting_requests=4) as site:
        status, answer = await site.post("/v1/completions", body)
        assert status == 400 and "at most 2 choices" in answer["error"]["message"]
        assert (await site.post("/v1/completions", {**body, "n": 2}))[0] == 200


async def test_what_a_request_brings_and_names_fits_at_one_gateway_of_many(open_site: OpenSite) -> None:
    """A part of the bound that is smaller than what one request may take would refuse it for ever."""
    asked = {"model": "tiny", "instructions": "a" * 200, "input": "b" * 50, "truncation": "auto"}
    async with open_site(processes=128, max_body_bytes=400) as site:
        status, first = await site.post("/v1/responses", asked)
        assert status == 200
        status, again = await site.post("/v1/responses", {**asked, "previous_response_id": first["id"]})
        assert (status, again.get("previous_response_id")) == (200, first["id"]), again
        assert (await site.get(f"/v1/responses/{first['id']}"))[0] == 200


async def test_only_others_bytes_refuse_a_read(open_site: OpenSite) -> None:
    """A long answer with log-probabilities may be larger than the whole part of a gateway."""
    async with open_site(processes=128, max_body_bytes=1000) as site:
        bodies = site.gateway.generator.bodies
        with bodies.holding() as one, bodies.holding(own=500) as same:
            one(500)
            same(100_000)
            with bodies.holding() as other, pytest.raises(RequestError, match="100500 bytes of other requests"):
                other(1)
        assert bodies.in_flight_bytes == 0
