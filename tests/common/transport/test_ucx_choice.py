"""What UCX may use by configuration: what is asked for and not here is an error, and what is used is told."""

from __future__ import annotations

import asyncio

import pytest

from cohort.common.errors import ConfigError
from cohort.common.transport.open_links import open_links
from cohort.common.transport.ucx_devices import UcxChoice, check_choice, local_resources, resources_of
from tests.hosts import DEVICE, needs_namespaces, two_hosts

from .links import LinkProcess, crc_of

pytest.importorskip("ucxx")
MB = 1 << 20


def test_what_is_here_passes_by_every_name_that_ucx_has_for_it() -> None:
    everything = local_resources(UcxChoice())
    assert "tcp/lo" in everything and "cma/memory" in everything
    assert resources_of(UcxChoice("tcp", "lo")) == ["tcp/lo"]
    assert {name.partition("/")[0] for name in resources_of(UcxChoice("sm,self"))} <= {"self", "sysv", "posix", "cma"}
    assert not any(name.startswith("tcp/") for name in resources_of(UcxChoice("^tcp")))
    assert "tcp/lo" not in resources_of(UcxChoice("", "^lo"))
    check_choice(UcxChoice())


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (UcxChoice("tcp,no_such"), r"transfer\.ucx\.tls: UCX has no 'no_such' here; it has .*tcp"),
        (UcxChoice("", "mlx9_7:1"), r"transfer\.ucx\.net_devices: UCX has no 'mlx9_7:1' here; it has .*lo"),
        (UcxChoice("tcp", "lo,eth77"), r"transfer\.ucx\.net_devices: UCX has no 'eth77' here"),
    ],
)
async def test_what_is_not_here_is_an_error_and_not_another_link(choice: UcxChoice, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_links(("ucx", "zmq"), zmq_bind="tcp://127.0.0.1:0", ucx=choice)


async def test_a_link_tells_how_bytes_went() -> None:
    paths = {}
    for tls in ("tcp", "posix,self,cma"):
        (link,) = open_links(("ucx",), zmq_bind="", ucx=UcxChoice(tls, "lo" if tls == "tcp" else ""))
        assert link.path(link.address()) == ""
        place = bytearray(MB)
        sending = link.send(link.address(), 1, bytes(MB), timeout_s=10)
        await asyncio.gather(sending, link.receive(1, place, timeout_s=10))
        paths[tls] = link.path(link.address())
        await link.close()
    assert paths["tcp"] == "tcp/lo"
    assert "memory" in paths["posix,self,cma"] and "tcp" not in paths["posix,self,cma"]


async def _moved(a: LinkProcess, b: LinkProcess, nbytes: int) -> str:
    receive = await b.begun_receive(tag=1, nbytes=nbytes, timeout_s=20)
    sent = await a.ask("send", peer=b.address, tag=1, seed=5, nbytes=nbytes, timeout_s=20)
    assert "error" not in sent, sent
    assert (await receive).get("crc") == crc_of(5, nbytes)
    return str((await a.ask("path", peer=b.address))["path"])


@needs_namespaces
@pytest.mark.pipeline
async def test_between_two_hosts_tcp_over_the_device_that_was_chosen() -> None:
    """Namespaces of one kernel share memory, too: only the choice makes UCX take the network."""
    with two_hosts() as hosts:
        chosen = {"LINK_TLS": "tcp", "LINK_DEVICES": DEVICE}
        a, b = await asyncio.gather(
            *(LinkProcess.start("ucx", before=hosts.before(index), **chosen) for index in (0, 1))
        )
        within = await LinkProcess.start("ucx", before=hosts.before(0), LINK_TLS="sm,self")
        beside = await LinkProcess.start("ucx", before=hosts.before(0), LINK_TLS="sm,self")
        try:
            assert await _moved(a, b, 3 * MB + 5) == f"tcp/{DEVICE}"
            assert await _moved(b, a, 3 * MB + 5) == f"tcp/{DEVICE}"
            path = await _moved(within, beside, 3 * MB + 5)
            assert "memory" in path and "tcp" not in path
        finally:
            for process in (a, b, within, beside):
                await process.end()
