"""`cohort serve`: options → configuration → checks → processes. Called by `__main__` and by the command line's front.

Exit codes: 0 ended on request, 1 a process was given up, 2 wrong options, configuration, model or ports,
3 --stop or --status found nothing running.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cohort.common import paths
from cohort.common.addresses import GATEWAY, MONITOR
from cohort.common.config import Config, dump_config, load_config
from cohort.common.devices.cores import usable_cores
from cohort.common.devices.inventory import this_machine, visible_gpus
from cohort.common.errors import CohortError, ConfigError, ModelError
from cohort.common.http import ports
from cohort.common.hub.model_source import located, permission
from cohort.common.keys.private_files import keep_private
from cohort.common.policies import settings
from cohort.services.launcher import control, preflight
from cohort.services.launcher.box import on_box, summary
from cohort.services.launcher.console import Console, Line
from cohort.services.launcher.hosts import Hosts, Pipeline
from cohort.services.launcher.local_hosts import LocalHosts
from cohort.services.launcher.models.default_model import is_complete
from cohort.services.launcher.models.gguf_folder import served_folder
from cohort.services.launcher.options import keys_of, overrides_of, ray_address
from cohort.services.launcher.plan import ProcessPlan, StopStage, api_scheme, http_base, plan, resolve
from cohort.services.launcher.run_files import LauncherState, ProcessMark, RunFiles, RunFilesError
from cohort.services.launcher.supervisor import Supervisor
from cohort.services.launcher.worker_orders import WorkerOrders

if TYPE_CHECKING:
    from cohort.services.launcher.on_ray.cluster import Cluster

EXIT_WRONG = 2
_LOCAL = (GATEWAY, MONITOR)
"""Processes that listen on this machine wherever the others are."""
_STAGES = {"gateways": StopStage.GATEWAY, "workers": StopStage.WORKERS}
"""Processes of --only."""
MODEL_TIMEOUT_S = 3600.0


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Serve, or do what --stop, --status, --detach or --print-config ask for. `arguments`: the command line after
    `serve`, which --detach runs again in the background."""
    keep_private()
    try:
        overrides = overrides_of(options, keys_of(options.config))
        given = "workers" in keys_of(options.config) | overrides.keys()
        if options.stop or options.status:
            config = load_config(options.config, preset=options.preset, overrides=overrides)
            files = _run_files(options, config)
            return (control.stop if options.stop else control.status)(files, config.gateway.port)
        if options.on is None and options.gateways:
            raise ConfigError("--gateways: for a pipeline on several machines (--on ray); here gateway.processes=N")
        if options.on is not None:
            return _serve_on_ray(options, arguments, overrides, workers_given=given)
        # Asked of the driver, which may take its time.
        config = load_config(options.config, preset=options.preset, overrides=overrides, machine=this_machine)
        return _serve(options, arguments, config, workers_given=given)
    except (CohortError, OSError) as error:
        sys.stderr.write(f"cohort serve: {error}\n")
        return EXIT_WRONG


def _serve(options: argparse.Namespace, arguments: list[str], config: Config, *, workers_given: bool) -> int:
    settings.check(config)
    config = located(config, "no" if options.print_config else permission(options.download))
    any_port = config.gateway.port == 0
    model = served_folder(_named_folder(config)) if options.print_config else _model_folder(config)
    gpus = visible_gpus()
    config = on_box(config, gpus, workers_given=workers_given, model=model)
    config = resolve(config, model=model, cores=usable_cores(), free_port=ports.free_port)
    if options.print_config:
        sys.stdout.write(dump_config(config))
        return 0
    preflight.check(config, model, api=options.only != "workers", workers=options.only != "gateways")
    plans = plan(config, usable_cores())
    if options.only is not None:
        stage = _STAGES[options.only]
        plans = [each for each in plans if each.stage is stage]
    files = _run_files(options, config)
    if options.detach:
        return _detach(options, arguments, files, plans, config.gateway.port if any_port else 0)
    with files.claim():
        preflight.check_ports(plans)
        preflight.raise_open_file_limit()
        files.write_config(dump_config(config))
        box = "" if options.only == "gateways" else summary(config, gpus)
        return asyncio.run(_supervise(config, plans, files, lambda _: LocalHosts(files), options.notify_fd, box))


def _run_files(options: argparse.Namespace, config: Config) -> RunFiles:
    return RunFiles(options.run_dir or paths.run_dir(config.gateway.port), logs_to_stdout=options.only is not None)


def _serve_on_ray(
    options: argparse.Namespace, arguments: list[str], overrides: dict[str, object], *, workers_given: bool
) -> int:
    """Serve on the cluster that this machine is a node of. What is imported here needs Ray."""
    from cohort.services.launcher.on_ray import cluster as ray_cluster

    address = ray_address(options)
    if options.detach:  # the cluster is looked at by the one that stays
        config = load_config(options.config, preset=options.preset, overrides=overrides)
        ray_cluster.check_installed()
        port = config.gateway.port or ports.free_port()
        return _detach(options, arguments, RunFiles(paths.run_dir(port)), [], 0 if config.gateway.port else port)
    cluster = ray_cluster.join(address)
    try:
        machine = ray_cluster.machine_of(cluster.survey())
        config = load_config(options.config, preset=options.preset, overrides=overrides, machine=lambda: machine)
        return _serve_joined(options, cluster, config, workers_given=workers_given)
    finally:
        cluster.leave()


def _serve_joined(options: argparse.Namespace, cluster: Cluster, config: Config, *, workers_given: bool) -> int:
    from cohort.services.launcher.on_ray.serving import settle

    settings.check(config)
    config = located(config, "no" if options.print_config else permission(options.download))
    model = _named_folder(config) if options.print_config else _model_folder(config)
    settled = settle(cluster, config, model=model, gateways=options.gateways or "1", workers_given=workers_given)
    config = settled.config
    if options.print_config:
        sys.stdout.write(dump_config(config))
        return 0
    preflight.check_exposure(config)
    preflight.check_certificate(config)
    files = RunFiles(paths.run_dir(config.gateway.port))
    plans = [placement.plan for placement in settled.placements]
    with files.claim():
        preflight.check_ports(each for each in plans if not each.passes_metrics_port and each.instance in _LOCAL)
        files.write_config(dump_config(config))
        return asyncio.run(_supervise(config, plans, files, settled.hosts, options.notify_fd, settled.box))


def _named_folder(config: Config) -> Path:
    """Return the folder or GGUF file of a configuration whose model is located."""
    return Path(config.model.path) if config.model.path else paths.default_model_dir()


def _model_folder(config: Config) -> Path:
    """Return the folder to serve; make the default model if it is the one wanted and absent."""
    folder = served_folder(_named_folder(config))
    if not config.model.path and not is_complete(folder):
        # In a process of its own: the launcher stays small, and torch's memory goes when it is done.
        command = [sys.executable, "-P", "-m", "cohort.services.launcher.models.default_model"]
        if subprocess.run(command, stdin=subprocess.DEVNULL, timeout=MODEL_TIMEOUT_S, check=False).returncode != 0:
            raise ModelError("the default model could not be made (see above); serve another with --model FOLDER")
    preflight.check_model(folder, with_weights=config.model.weights == "files")
    return folder


def _detach(
    options: argparse.Namespace, arguments: list[str], files: RunFiles, plans: Sequence[ProcessPlan], found_port: int
) -> int:
    """Start this command line again in the background. `found_port`: a port that was chosen here, or 0. Errors that
    would end the background process are raised here, where the operator reads them."""
    if files.claimed:
        with files.claim():  # raises with the message that names the other one
            pass
    preflight.check_ports(plans)
    again = [argument for argument in arguments if argument != "--detach"]
    again += ["--port", str(found_port)] if found_port else []
    return control.detach(again, files, options.ready_timeout)


async def _supervise(
    config: Config,
    plans: Sequence[ProcessPlan],
    files: RunFiles,
    hosts_of: Callable[[Pipeline], Hosts],
    notify_fd: int,
    box: str,
) -> int:
    base = http_base(config.gateway.host, config.gateway.port, api_scheme(config))
    starter = _Starter(notify_fd)
    lines = [Line(process.instance, process.port, files.log_file(process.instance)) for process in plans]
    console = Console(lines, listener=starter.send)
    own_mark = ProcessMark.of(os.getpid())
    if own_mark is None:
        raise RunFilesError("/proc is not readable; the launcher needs it to tell processes apart")

    def record() -> None:
        state = LauncherState(
            launcher=own_mark,
            name=config.name,
            url=base,
            stop_timeout_s=_stop_timeout_s(plans),
            processes=supervisor.marks,
            ready_urls=supervisor.ready_urls,
            nodes=supervisor.nodes,
            restart=supervisor.restart,
        )
        try:
            files.write_state(state)
        except OSError as error:  # a full disk: --status and --stop see an older state, and everything runs
            console.print_line(f"the state of the processes is not written: {error}", style="yellow")

    def ready() -> None:
        console.freeze()
        stages = {process.stage for process in plans}
        console.print_line(
            ready_text(config) if len(stages) > 1 else f"ready: {', '.join(each.instance for each in plans)}"
        )
        starter.ready()

    pipeline = Pipeline(files, console, record)
    hosts = hosts_of(pipeline)
    supervisor = Supervisor(pipeline, hosts, plans)
    # Where there is nothing to order from, as in a container, the monitor refuses to plan.
    acts = config.planner.mode == "act" and not files.logs_to_stdout
    orders = WorkerOrders(config, supervisor, hosts).listening(files.folder) if acts else contextlib.nullcontext()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.request_stop)
    loop.add_signal_handler(signal.SIGUSR1, supervisor.request_restart)
    record()
    if box:
        console.print_line(box)
    console.start()
    try:
        async with orders:
            return await supervisor.run(ready)
    finally:
        console.freeze()


def _stop_timeout_s(plans: Sequence[ProcessPlan]) -> float:
    """Return the longest time of an orderly stop: the stages' deadlines one after the other."""
    stages = {stage: [process.stop_timeout_s for process in plans if process.stage is stage] for stage in StopStage}
    return 10.0 + sum(max(times) for times in stages.values() if times)


def ready_text(config: Config) -> str:
    """Return the operator's summary once it runs: the URL, the live page, a request to copy."""
    base = http_base(config.gateway.host, config.gateway.port, api_scheme(config))
    model = config.model.served_name or Path(config.model.path).name
    body: dict[str, object] = {"model": model}
    if has_chat_template(Path(config.model.path)):
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "What is the capital of Japan?"}]
    else:
        path = "/v1/completions"
        body["prompt"] = "The colours of the sea are"
    body["max_tokens"] = 60
    key = _key_header(config)
    return "\n".join(
        [
            "",
            f"Cohort serves {model} on {base}",
            f"  live page  {http_base(config.monitor.host, config.monitor.port)}",
            "  try        " + f"curl {base}{path} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'",
        ]
    )


def has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists() or (folder / "chat_template.json").exists():
        return True
    try:
        return "chat_template" in json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _key_header(config: Config) -> str:
    """Return curl's option with an API key, by its variable's name: no key is printed."""
    if not (config.gateway.api_keys or config.keys.file):
        return ""
    first = next(iter(config.gateway.api_keys), "")
    name = first.removeprefix("env:") if first.startswith("env:") else "COHORT_API_KEY"
    return f' -H "Authorization: Bearer ${name}"'


class _Starter:
    """Pipe to the process that detached this one and reads along until all is ready. It is never waited for."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        if descriptor >= 0:
            os.set_blocking(descriptor, False)

    def send(self, text: str) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, f"{text}\n".encode())

    def ready(self) -> None:
        self.send(control.READY)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
