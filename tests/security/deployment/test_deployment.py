"""What a deployment opens without being asked to: the API, the containers, Grafana.

Repeats three oversights: COHORT_API_KEY set for docker compose and listened to by nobody; an API reachable from other
machines without any key; workers in the host's IPC and process namespaces, with a capability, under a uid that people
have. The compose file is read, the entry point run up to the moment it becomes a process.
"""

from __future__ import annotations

import re
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml

from cohort.common.config import Config, EndpointsConfig, GatewayConfig, SecurityConfig, WorkerGroup, load_config
from cohort.common.errors import ConfigError
from cohort.common.http import exposure
from cohort.common.http.browsers import BrowserGuard
from cohort.common.transport.security import load_keys
from cohort.common.types import Role
from cohort.services.bench.chaos import tiny_model
from cohort.services.cli.__main__ import main as cohort
from tests.containers import COMPOSE, ENTRYPOINT, ROOT, SERVICES

PROCESSES = [name for name, service in SERVICES.items() if str(service["image"]).startswith("cohort:")]
WORKERS = [name for name in PROCESSES if "worker" in name]


def overlay(name: str) -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker" / name).read_text())["services"]
    return services


# -- the API key ---------------------------------------------------------------------------------------------------


def configured(tmp_path: Path, role: str = "gateway", **environment: str) -> Config:
    """What the process that the entry point becomes would read: `python` is replaced by what shows its arguments."""
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done\n')
    fake.chmod(0o755)
    command = SERVICES[role]["command"]
    done = subprocess.run(
        [ENTRYPOINT, *command],
        env={"PATH": f"{fake.parent}:/usr/bin:/bin", "COHORT_RUN_DIR": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    return load_config([Path(words[at + 1]) for at, word in enumerate(words) if word == "--config"])


def defaults(service: str, **settings: str) -> dict[str, str]:
    """The service's environment as compose fills it in, from `settings` and from nothing else."""
    filled = {}
    for name, value in SERVICES[service]["environment"].items():
        filled[name] = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: settings.get(found[1]) or found[2], value)
    return filled


def test_the_key_in_the_environment_is_asked_for(tmp_path: Path):
    config = configured(tmp_path, **defaults("gateway", COHORT_API_KEY="sk-1", COHORT_BIND="0.0.0.0"))
    assert config.gateway.api_keys == ("env:COHORT_API_KEY",)
    exposure.check_api(config)


def test_a_fresh_box_serves_its_own_clients_without_any_setting(tmp_path: Path):
    config = configured(tmp_path, **defaults("gateway"))
    assert config.gateway.api_keys == () and config.gateway.host == "0.0.0.0"
    exposure.check_api(config)


@pytest.mark.parametrize("bind", ["0.0.0.0", "192.0.2.7", "::", "[::]"])
def test_published_beyond_this_machine_it_wants_a_key_or_a_clear_word(tmp_path: Path, bind: str):
    with pytest.raises(ConfigError, match=r"COHORT_API_KEY.*COHORT_OPEN=true"):
        exposure.check_api(configured(tmp_path, **defaults("gateway", COHORT_BIND=bind)))
    exposure.check_api(configured(tmp_path, **defaults("gateway", COHORT_BIND=bind, COHORT_OPEN="true")))


def test_keys_of_an_own_configuration_win(tmp_path: Path):
    own = tmp_path / "own.yaml"
    own.write_text("gateway: {api_keys: [a, b]}\n")
    settings = defaults("gateway", COHORT_API_KEY="sk-1", COHORT_CONFIG=str(own))
    assert configured(tmp_path, **settings).gateway.api_keys == ("a", "b")


def test_an_unclear_word_is_refused(tmp_path: Path):
    with pytest.raises(subprocess.CalledProcessError) as refused:
        configured(tmp_path, **defaults("gateway", COHORT_OPEN="yes"))
    assert "write true or false" in refused.value.stderr


def test_the_other_processes_start_as_before(tmp_path: Path):
    config = configured(tmp_path, "prefill_worker_cpu", COHORT_HOST="w1")
    assert config.endpoints.worker == "tcp://w1:0"
    assert config.security.curve_secret_key_file.startswith("/var/cache/cohort/")
    exposure.check_endpoints(config)


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.0.2.7", "some-name", "126.0.0.1"])
def test_the_api_is_not_reachable_from_elsewhere_by_oversight(host: str):
    with pytest.raises(ConfigError, match=r"gateway\.host: .*gateway\.api_keys.*gateway\.open=true"):
        exposure.check_api(Config(gateway=GatewayConfig(host=host)))
    exposure.check_api(Config(gateway=GatewayConfig(host=host, open=True)))
    exposure.check_api(Config(gateway=GatewayConfig(host=host, api_keys=("sk-1",))))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_on_loopback_it_may_be_open(host: str):
    exposure.check_api(Config(gateway=GatewayConfig(host=host)))


@pytest.mark.pipeline
def test_the_gateway_refuses_at_start_with_one_sentence(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cohort.services.gateway", "--config", str(tmp_path / "c.yaml"), "--run-dir", "r"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "COHORT_CACHE_DIR": str(tmp_path)},
        cwd=write(tmp_path, "gateway: {host: 0.0.0.0, port: 1}\nlogging: {format: json}\n"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "gateway.host: 0.0.0.0 can be reached from other machines" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_launcher_says_it_before_it_starts_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path / "cache"))
    model = tmp_path / "model"
    tiny_model.write(model)
    assert cohort(["serve", "--host", "0.0.0.0", "--port", "0", "--model", str(model)]) == 2
    assert "cohort serve: gateway.host: 0.0.0.0 can be reached" in capsys.readouterr().err
    assert not (tmp_path / "cache" / "run").exists()


def write(folder: Path, text: str) -> Path:
    (folder / "c.yaml").write_text(text)
    return folder


def test_a_key_that_is_never_asked_for_is_noticed():
    assert exposure.unused_key(Config(), {"COHORT_API_KEY": "sk-1"})
    assert not exposure.unused_key(Config(), {"COHORT_API_KEY": ""})
    assert not exposure.unused_key(Config(gateway=GatewayConfig(api_keys=("a",))), {"COHORT_API_KEY": "sk-1"})


async def test_the_gateway_says_so_at_start(monkeypatch: pytest.MonkeyPatch):
    from cohort.services.gateway import service

    class Stop(Exception):
        pass

    def no_model(config: Config) -> None:
        raise Stop

    class Context:
        config = Config()
        log = structlog.get_logger("gateway")

    monkeypatch.setattr(service, "load_model", no_model)
    monkeypatch.setenv("COHORT_API_KEY", "sk-secret")
    with structlog.testing.capture_logs() as events, pytest.raises(Stop):
        await service.build(Context())  # type: ignore[arg-type]
    [warning] = [event["event"] for event in events if event["log_level"] == "warning"]
    assert "COHORT_API_KEY is set" in warning and "sk-secret" not in warning


# -- keys between processes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoints",
    [
        EndpointsConfig(manager="tcp://bucketing_manager:5551"),
        EndpointsConfig(worker="tcp://192.0.2.7:0"),
        EndpointsConfig(gateway="tcp://127.0.0.1:5554", bind_host="0.0.0.0"),
    ],
)
def test_plain_tcp_beyond_loopback_is_refused(endpoints: EndpointsConfig):
    with pytest.raises(ConfigError, match=r"^endpoints\.\w+: .*cohort keys FILE.*security\.allow_plain=true"):
        exposure.check_endpoints(Config(endpoints=endpoints))
    exposure.check_endpoints(Config(endpoints=endpoints, security=SecurityConfig(allow_plain=True)))
    exposure.check_endpoints(Config(endpoints=endpoints, security=SecurityConfig(curve_secret_key_file="k")))


HOSTS = (WorkerGroup(Role.DECODE, tensor_parallel=4, hosts=2),)


def test_ranks_of_several_hosts_exchange_nothing_in_clear_by_oversight():
    """A key encrypts what rank 0 tells them, and cannot encrypt what they tell each other."""
    beyond = EndpointsConfig(ranks="tcp://192.0.2.7:5560", bind_host="127.0.0.1")
    with pytest.raises(ConfigError, match=r"^endpoints\.ranks: .*security\.allow_plain=true"):
        exposure.check_endpoints(Config(workers=HOSTS, endpoints=beyond))
    with pytest.raises(ConfigError, match=r"^security\.allow_plain_ranks: "):
        exposure.check_endpoints(
            Config(workers=HOSTS, endpoints=beyond, security=SecurityConfig(curve_secret_key_file="k"))
        )
    for told in (SecurityConfig(curve_secret_key_file="k", allow_plain_ranks=True), SecurityConfig(allow_plain=True)):
        exposure.check_endpoints(Config(workers=HOSTS, endpoints=beyond, security=told))
    here = EndpointsConfig(ranks="tcp://127.0.0.1:5560")
    for key in ("", "k"):
        exposure.check_endpoints(
            Config(workers=HOSTS, endpoints=here, security=SecurityConfig(curve_secret_key_file=key))
        )


@pytest.mark.parametrize("nowhere", ["", "ipc:///tmp/ranks", "tcp://somewhere", "tcp://somewhere:any"])
def test_ranks_of_several_hosts_need_a_place_to_meet(nowhere: str):
    with pytest.raises(ConfigError, match=r"^endpoints\.ranks: .* is not tcp://HOST:PORT"):
        exposure.check_endpoints(Config(workers=HOSTS, endpoints=EndpointsConfig(ranks=nowhere)))


def test_unix_sockets_and_loopback_need_no_key():
    exposure.check_endpoints(Config())
    exposure.check_endpoints(Config(endpoints=EndpointsConfig(manager="tcp://127.0.0.1:1", worker="tcp://[::1]:0")))


@pytest.mark.pipeline
def test_a_process_does_not_start_in_clear(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cohort.services.bucketing_manager", "--config", "c.yaml", "--run-dir", "r"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "COHORT_CACHE_DIR": str(tmp_path)},
        cwd=write(tmp_path, "endpoints: {manager: 'tcp://192.0.2.7:5551', bind_host: 127.0.0.1}\n"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "tcp://192.0.2.7:5551 leaves this machine" in done.stderr and "Traceback" not in done.stderr


def test_cohort_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "new" / "cluster.key"
    assert cohort(["keys", f"{tmp_path}/new/"]) == 0
    keys = load_keys(path)
    assert keys is not None and stat.S_IMODE(path.stat().st_mode) == 0o600
    shown = capsys.readouterr().out
    assert str(path) in shown and keys.secret.decode() not in shown
    assert cohort(["keys", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert cohort(["keys", "--keep", str(path.parent)]) == 0
    assert load_keys(path) == keys
    path.write_text("nonsense")
    assert cohort(["keys", "--keep", str(path)]) == 2
    with pytest.raises(SystemExit) as ended:
        cohort(["keys", "--help"])
    assert ended.value.code == 0 and "curve_secret_key_file" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    assert cohort(["keys", str(tmp_path / "file" / "cluster.key")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_first_service_makes_the_key_that_the_others_name(tmp_path: Path):
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "python"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    said = subprocess.run(
        [ENTRYPOINT, *SERVICES["model"]["command"]],
        env={"PATH": f"{fake.parent}:/usr/bin:/bin", "COHORT_CACHE_DIR": "/var/cache/cohort"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    named = load_config([ROOT / "configs" / "compose.yaml"]).security.curve_secret_key_file
    assert said[0] == f"-P -m cohort.services.cli keys --keep {named}"
    assert "-P -m cohort.services.launcher.models.default_model" in said  # beside the kernels, in any order


# -- containers ------------------------------------------------------------------------------------------------------


def test_no_container_is_in_the_hosts_namespaces_or_has_a_capability():
    for name, service in SERVICES.items():
        assert not {"ipc", "pid", "network_mode", "cap_add", "privileged", "userns_mode", "devices"} & set(service), (
            name
        )
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name


def test_writes_of_a_read_only_container_have_a_place():
    for name in PROCESSES:
        mounts = {mount.split(":")[0]: mount.partition(":")[2] for mount in SERVICES[name]["tmpfs"]}
        assert set(mounts) == {"/run/cohort", "/tmp"}
        assert "uid=64118" in mounts["/run/cohort"] and "mode=0700" in mounts["/run/cohort"]
    config = load_config([ROOT / "configs" / "compose.yaml"])
    assert config.state.folder == "/var/lib/cohort"
    for name in ("gateway", "length_predictor", *WORKERS):
        [volume] = [mount for mount in SERVICES[name]["volumes"] if mount.endswith(":/var/lib/cohort")]
        sharers = {other for other in PROCESSES if volume in SERVICES[other].get("volumes", ())}
        assert sharers == (set(WORKERS) if name in WORKERS else {name})


def test_shared_volumes_are_written_by_one_process():
    writers = [
        name
        for name, service in SERVICES.items()
        for mount in service.get("volumes", ())
        if mount.split(":")[0] in ("cache", "models") and not mount.endswith(":ro")
    ]
    assert writers == ["model"]


def test_the_image_runs_under_a_uid_that_no_person_has():
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    [user] = re.findall(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE)
    assert user == ("64118", "64118")
    for variable in ("XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert re.search(rf"\b{variable}=/(tmp|var/lib/cohort)/", dockerfile), variable


def test_prompts_cross_a_network_of_their_own():
    pipeline = {name for name, service in SERVICES.items() if "control" in service["networks"]}
    assert pipeline == set(PROCESSES) - {"model"}
    assert COMPOSE["networks"]["control"] == {"internal": True}
    assert {name for name, service in SERVICES.items() if "observe" in service["networks"]} == {
        "global_monitor",
        "prometheus",
        "grafana",
    }


def test_ports_are_published_on_loopback_unless_a_setting_says_otherwise():
    for name, service in SERVICES.items():
        for port in service.get("ports", ()):
            host = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", port).rsplit(":", 2)[0]
            assert host == "127.0.0.1", name
    # The live page takes no key: opening the API does not open it.
    assert "${COHORT_BIND" not in SERVICES["global_monitor"]["ports"][0]


def test_images_have_exact_tags_and_take_a_digest():
    for name in ("prometheus", "grafana"):
        assert re.fullmatch(r"\$\{COHORT_\w+_IMAGE:-[\w/]+:v?\d+\.\d+\.\d+\}", SERVICES[name]["image"])
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert re.search(
        r"^ARG PYTHON_IMAGE=python:\d+\.\d+\.\d+-slim-bookworm\nFROM \$\{PYTHON_IMAGE\}$", dockerfile, re.M
    )
    assert re.match(r"# syntax=docker/dockerfile:\d+\.\d+\.\d+\n", dockerfile)
    python = SERVICES["gateway"]["build"]["args"]["PYTHON_IMAGE"]
    assert python == "${COHORT_PYTHON_IMAGE:-" + re.findall(r"^ARG PYTHON_IMAGE=(.*)$", dockerfile, re.M)[0] + "}"


def test_kv_that_nothing_encrypts_stays_in_the_memory_of_one_container(tmp_path: Path):
    """UCX has memory transports only, and only there it may be used beside a key: no KV in clear on a network."""
    assert set(SERVICES["workers"]["environment"]["UCX_TLS"].split(",")) <= {"cuda_copy", "cuda_ipc", "sm", "self"}
    assert configured(tmp_path, "workers").transfer.plain_links_allowed
    for name in WORKERS:
        if name != "workers":
            assert not configured(tmp_path, name).transfer.plain_links_allowed, name


def test_grafana_has_no_known_password():
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    login = overlay("grafana-login.yml")["grafana"]["environment"]
    assert login["GF_SECURITY_ADMIN_PASSWORD"].startswith("${COHORT_GRAFANA_PASSWORD:?")


@pytest.mark.parametrize(
    ("service", "bind", "section"),
    [("gateway", "COHORT_BIND", "gateway"), ("global_monitor", "COHORT_MONITOR_BIND", "monitor")],
)
def test_a_port_published_here_alone_answers_to_names_of_this_machine_alone(
    tmp_path: Path, service: str, bind: str, section: str
) -> None:
    """In a container every process listens on all interfaces, so what is published must tell."""
    here = getattr(configured(tmp_path, service, **defaults(service)), section)
    guard = BrowserGuard(here.host, here.allowed_hosts, option="allowed_hosts")
    assert guard.refusal("POST", {"Host": "evil.example"}) is not None
    keyed = getattr(configured(tmp_path, service, **defaults(service, COHORT_API_KEY="k")), section)
    assert keyed.allowed_hosts == here.allowed_hosts
    for name in ("localhost:8000", "127.0.0.1:8001", service, socket.gethostname()):
        assert guard.refusal("POST", {"Host": name}) is None, name
    settings = {bind: "0.0.0.0", "COHORT_OPEN": "true"}
    elsewhere = getattr(configured(tmp_path, service, **defaults(service, **settings)), section)
    assert elsewhere.allowed_hosts == ()
