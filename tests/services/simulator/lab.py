"""Small clusters for simulator tests."""

from __future__ import annotations

from typing import Any

from cohort.common.config import Config, load_config
from cohort.common.policies.cost_model import ModelShape
from cohort.common.policies.settings import placed
from cohort.common.types import Slo
from cohort.common.workloads.items import WorkItem, Workload
from cohort.services.simulator.core.cluster import SimCluster
from cohort.services.simulator.core.engine import SimWorker
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.hardware.hardware import Cluster, load_cluster

# Big enough to be worth batching, small enough that a few blocks fill the cache.
MODEL = ModelShape("small", 4, 512, 8, 8, 64, 2048, True, 1000, False, 2048, 2, 2)


def config(preset: str = "unified", **sections: dict[str, Any]) -> Config:
    """Settings stand beside the options of their section."""
    return load_config(preset=preset, overrides=placed(sections))


def cluster(instances: int = 1, **overrides: Any) -> Cluster:
    """Make a cluster whose stack takes milliseconds an iteration, so that a few small requests are a load."""
    return load_cluster(f"a100-80:{instances}", {"stack": "graphs"} | overrides)


def cache_of(blocks: int) -> dict[str, Any]:
    """`kv` section: so many blocks of 16 on each instance."""
    return {"memory_bytes": blocks * MODEL.kv_geometry(16).block_bytes}


def workload(*lengths: tuple[float, int, int], slo: Slo | None = None) -> Workload:
    items = tuple(WorkItem(arrival, prompt, output, slo=slo or Slo()) for arrival, prompt, output in lengths)
    return Workload("test", items)


class Recorded(SimCluster):
    """Remembers when every token of every request reached the gateway, in which order requests ended, and how many
    events were void when their time came: the end of a jump that was interrupted on its way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.void = 0
        step_ended = self.engine._step_ended

        def counted(worker: SimWorker, epoch: int) -> None:
            self.void += epoch != worker.epoch
            step_ended(worker, epoch)

        self.engine._step_ended = counted  # type: ignore[method-assign]
        self.token_times: dict[str, list[float]] = {}
        clients = self.clients
        one_by_one, together, finished = clients._tokens, clients._repeated, clients._finished
        self.ended: list[int] = []

        def tokens(now_s: float, live: Any, count: int) -> None:
            self.token_times.setdefault(f"r{live.index}", []).extend([now_s] * count)
            one_by_one(now_s, live, count)

        def repeated(live: Any, run: Any) -> None:
            self.token_times[f"r{live.index}"].extend(run.times_s)
            together(live, run)

        def end(now_s: float, live: Any) -> None:
            self.ended.append(live.index)
            finished(now_s, live)

        clients._tokens, clients._repeated, clients._finished = tokens, repeated, end  # type: ignore[method-assign]


def run(config_: Config, cluster_: Cluster, workload_: Workload, **options: Any) -> Recorded:
    sim = Recorded(config_, cluster_, MODEL, workload_, SimOptions(**options))
    sim.run()
    for worker in sim.workers:
        worker.machine.check()
    return sim
