"""Attack: guess what another API key has sent, by what the prefix cache already holds of a guess.

`cached_tokens` in an answer's usage tells it, and so does its time, block by block.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.config import Config, KvConfig
from cohort.common.kv.block_pool import block_hashes, prefix_root
from cohort.common.machines.events import Offered
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.baselines.placements import Disaggregated
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, Request, SamplingParams
from cohort.services.gateway.keys.owners import Owners
from tests.common.machines.clusters import PD
from tests.common.machines.world import GATEWAY, STOP_TOKEN, Owned, World
from tests.common.policies.baselines.drive import BLOCK, GEOMETRY
from tests.services.gateway.batch_client import ask as line
from tests.services.gateway.batch_client import begin, client_of, ended, job
from tests.services.gateway.conftest import OpenSite, Site, model_dir, open_site  # noqa: F401

SECRET = list(range(100, 100 + 4 * BLOCK + 1))


def sequence(name: str, salt: str, tokens: Seq[int] = SECRET) -> Sequence:
    request = Request(
        Attempt(name, 0), "gateway", list(tokens), len(tokens), SamplingParams(max_tokens=9), 0.0, prefix_salt=salt
    )
    return Sequence(request, list(tokens), None, 0, 0.0)


def computed(kv: PagedAllocator, name: str, salt: str) -> Sequence:
    """A prompt whose KV is there; its blocks are in the prefix cache."""
    made = sequence(name, salt)
    assert kv.admit(made) is not None
    made.computed = made.known
    kv.committed(made)
    return made


# -- what workers share --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [False, True], ids=["running", "finished"])
def test_prompts_of_another_salt_find_nothing(gone: bool) -> None:
    kv = PagedAllocator(GEOMETRY, 64, 0)
    first = computed(kv, "a", "salt-a")
    if gone:
        kv.release(first.key)
    assert kv.admit(sequence("b", "salt-b")) == 0
    assert kv.admit(sequence("none", "")) == 0
    assert kv.admit(sequence("a2", "salt-a")) == 4 * BLOCK
    assert kv.reserve(Attempt("b-moved", 0), SECRET, len(SECRET), salt="salt-b") == 0
    assert kv.reserve(Attempt("a-moved", 0), SECRET, len(SECRET), salt="salt-a") == 4 * BLOCK
    kv.check()


def test_without_salts_prompts_are_shared_as_ever() -> None:
    kv = PagedAllocator(GEOMETRY, 64, 0)
    computed(kv, "a", "")
    assert kv.admit(sequence("b", "")) == 4 * BLOCK


def test_a_sequence_back_from_host_memory_keeps_its_salt() -> None:
    kv = PagedAllocator(GEOMETRY, 64, 64)
    first = computed(kv, "a", "salt-a")
    assert kv.swap_out(first) and kv.swap_in(first)
    kv.committed(first)
    assert kv.admit(sequence("b", "salt-b")) == 0
    assert kv.admit(sequence("a2", "salt-a")) == 4 * BLOCK


@given(st.lists(st.integers(0, 9), min_size=4, max_size=24), st.text(max_size=70), st.text(max_size=70))
def test_chains_of_different_salts_have_no_hash_in_common(tokens: list[int], one: str, other: str) -> None:
    ours, theirs = (block_hashes(tokens, 4, parent=prefix_root(salt)) for salt in (one, other))
    assert (ours == theirs) == (one == other)
    assert one == other or not set(ours) & set(theirs)
    assert block_hashes(tokens, 4, parent=prefix_root("")) == block_hashes(tokens, 4)


# -- who has which salt --------------------------------------------------------------------------------------------


def salts(config: Config, keys: Seq[str], *owners: str) -> list[str]:
    made = Owners(config, keys)
    plain = [msgspec.structs.replace(sequence("r", "").request)]
    return [made.with_owner(plain, owner, max_tokens_named=True)[0].prefix_salt for owner in owners]


def test_each_of_several_keys_has_a_salt_of_its_own() -> None:
    one, again, other = salts(Config(), ("a", "b"), "digest-a", "digest-a", "digest-b")
    assert one and one == again and other and one != other
    assert "digest" not in one + other


@pytest.mark.parametrize("keys", [(), ("a",), ("a", "a")])
def test_with_one_key_nothing_changes(keys: tuple[str, ...]) -> None:
    assert salts(Config(), keys, "digest-a", "") == ["", ""]


def test_keys_share_prefixes_where_that_is_configured() -> None:
    config = Config(kv=KvConfig(share_prefixes_between_keys=True))
    assert salts(config, ("a", "b"), "digest-a", "digest-b") == ["", ""]


async def submit(site: Site, key: str, **more: Any) -> str:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"prompt": "the same words", "max_tokens": 4, **more}
    assert (await site.post("/v1/completions", body, headers=headers))[0] == 200
    return site.manager.submitted[-1].prefix_salt


async def test_requests_carry_their_keys_salt(open_site: OpenSite) -> None:  # noqa: F811
    async with open_site(api_keys=("key-a", "key-b")) as site:
        one, again, other = [await submit(site, key) for key in ("key-a", "key-a", "key-b")]
        assert one and one == again and other and one != other
        assert len({request.prefix_salt for request in site.manager.submitted}) == 2


async def test_lines_of_a_batch_carry_the_salt_of_its_owner(open_site: OpenSite) -> None:  # noqa: F811
    async with open_site(api_keys=("key-a", "key-b")) as site:
        direct = await submit(site, "key-b")
        async with client_of(site, "key-b") as client:
            batch = await ended(client, await begin(client, job(line("the same words"))))
        assert batch.status == "completed"
        assert site.manager.submitted[-1].prefix_salt == direct != ""


# -- across workers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("salts_of", "shared"), [(("a", "b"), False), (("a", "a"), True)])
def test_kv_that_moves_between_workers_keeps_its_salt(salts_of: tuple[str, str], shared: bool) -> None:
    """A prefill worker and a decode worker: both look prompts up, the second when KV is on its way there."""
    world = World(5, PD, Disaggregated)
    world.run(3.0)
    prompt = [7] * 21
    for index, salt in enumerate(salts_of):
        name = f"r{index}"
        world.owned[name] = Owned(prompt, 6, list(prompt), submitted_s=world.now_s)
        sampling = SamplingParams(max_tokens=6, stop_token_ids=(STOP_TOKEN,))
        request = Request(Attempt(name, 0), GATEWAY, prompt, len(prompt), sampling, world.now_s, prefix_salt=salt)
        world.cluster.feed(world.cluster.nodes[GATEWAY], Offered(name, [request]))
        world.run_until_quiet()
    world.check_outputs()
    hits = {name: node.worker.kv.metrics()["prefix_hits_total"] for name, node in world.workers.items()}
    assert [bool(hits[name]) for name in PD] == [shared, shared]
