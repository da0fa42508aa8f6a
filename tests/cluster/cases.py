"""One life of a preset's virtual cluster, as data: hypothesis draws it, and a failure is written down as it prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, get_args

from hypothesis import strategies as st

from cohort.common.config import CONFIGS_DIR, Config
from cohort.common.policies import compose
from cohort.common.policies.baselines.placements import Colocated, Disaggregated
from cohort.common.policies.interface import Placement
from cohort.common.types import IfLate, Slo, TrafficClass
from tests.cluster.refusing import Refusing
from tests.common.machines.clusters import Asked, of_config, small, strike, submit_at, tokens
from tests.common.machines.faults import Fault, any_faults
from tests.common.machines.world import SplitAnywhere, World, expected_output
from tests.support.kinds import by_default

PRESETS = sorted(path.stem for path in (CONFIGS_DIR / "presets").glob("*.yaml"))
_BASELINES_TRIED = ("baseline-chunked-prefill", "baseline-uellm")
TRIED = [name for name in PRESETS if not name.startswith("baseline-") or name in _BASELINES_TRIED]
"""Those that share no scheduler, by default: of the baselines one that pages and one of padded batches."""


def every_second(first: int) -> list[Any]:
    """Of those, for `parametrize`: what one file leaves to nightly runs another file tries."""
    return by_default(PRESETS, *TRIED[first::2])


def every_third(first: int) -> list[Any]:
    return by_default(PRESETS, *TRIED[first::3])


OUTCOMES: tuple[IfLate, ...] = get_args(IfLate)
LONGEST_PROMPT, LONGEST_OUTPUT = 40, 30
CACHES = (20, 30, 64)
"""Blocks of a worker: the smallest holds the longest request, with two to spare."""

Overrides = Mapping[str, Mapping[str, Any]]
Arrival = tuple[float, int, bool, int, TrafficClass, float]
"""Second, prompt tokens, whether it begins as others do, answer at most, class, prediction over true length."""

ARRIVALS: st.SearchStrategy[list[Arrival]] = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),
        st.integers(1, LONGEST_PROMPT),
        st.booleans(),
        st.integers(1, LONGEST_OUTPUT),
        st.sampled_from(["rt", "be"]),
        st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 30.0]),
    ),
    min_size=8,
    max_size=40,
)

PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "anywhere": SplitAnywhere,
    "colocated": lambda seed: Colocated(),
    "disaggregated": lambda seed: Disaggregated(),
    "refusing": lambda seed: Refusing(SplitAnywhere(seed), seed),
}


def _baseline(**more: Any) -> st.SearchStrategy[Overrides]:
    policies = {"allocation": st.sampled_from(["paged", "max", "predicted"])}
    return _sections(policies=policies, engine=_PREEMPTION, kv=_CACHING, **more)


def _sections(**sections: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Overrides]:
    return st.fixed_dictionaries({name: st.fixed_dictionaries(dict(values)) for name, values in sections.items()})


_PREEMPTION = {"preemption": st.sampled_from(["swap", "recompute"]), "prefill_chunk": st.sampled_from([3, 8, 32])}
_CACHING = {"prefix_caching": st.booleans()}
_ECOSERVE = _sections(
    policies={"allocation": st.sampled_from(["nested", "paged", "predicted"])},
    engine=_PREEMPTION,
    kv=_CACHING,
    ecoserve={
        **{name: st.booleans() for name in ("synced", "ordered", "pipelined", "decoupled")},
        "lending": st.sampled_from(["halves", "forecast"]),
    },
)
OPTIONS: dict[str, st.SearchStrategy[Overrides]] = {
    **{name: _baseline() for name in PRESETS if name.startswith("baseline-")},
    **{
        name: _baseline(baselines={"headroom": st.booleans()}) for name in ("baseline-vllm", "baseline-chunked-prefill")
    },
    "baseline-uellm": _baseline(
        baselines={"padded": st.booleans(), "rectangular_kv": st.booleans(), "static_batches": st.booleans()}
    ),
    **{name: _sections(engine=_PREEMPTION, kv=_CACHING) for name in ("cohort", "disaggregated", "unified")},
    "alignedserve": _sections(
        engine=_PREEMPTION,
        kv=_CACHING,
        alignedserve={
            **{name: st.booleans() for name in ("prefetch", "aligned", "fill_memory")},
            "starvation_s": st.sampled_from([0.2, 5.0]),
        },
    ),
    "bros": _sections(
        policies={
            "iteration": st.sampled_from(["slack_packing", "continuous_batching", "round_robin", "vllm", "srtf"]),
            "allocation": st.sampled_from(["bidirectional", "paged"]),
        },
        engine=_PREEMPTION,
        bros={"group_tokens": st.sampled_from([1, 4]), **{name: st.booleans() for name in ("cut_prompts", "drops")}},
    ),
    "bucketserve": _sections(
        engine=_PREEMPTION,
        kv=_CACHING,
        bucketserve={
            "fill": st.sampled_from(["oldest", "sjf", "ljf"]),
            "output_estimate": st.sampled_from(["mean", "max"]),
        },
    ),
    "dynaserve": _sections(
        engine=_PREEMPTION,
        kv=_CACHING,
        dynaserve={
            "balance": st.sampled_from(["work", "end"]),
            "await_arrivals": st.booleans(),
            "whole_where_idle": st.booleans(),
            "tbt_slo_s": st.sampled_from([0.012, 0.1]),
        },
    ),
    "ecoserve": _ECOSERVE,
    "ecoserve-forecast": _ECOSERVE,
}
"""What a preset leaves to its operator, and settings."""


@dataclass(frozen=True, kw_only=True)
class Case:
    preset: str
    arrivals: list[Arrival]
    seed: int = 0
    faults: list[Fault] = field(default_factory=list)
    workers: Mapping[str, int] = field(default_factory=dict)
    """Number by role; {} = the preset's."""
    blocks: int = 64
    host_blocks: int = 16
    failures: float = 0.0
    delay_s: float = 0.01
    loss: float = 0.0
    repeat: float = 0.0
    placement: str = ""
    """One of `PLACEMENTS`; "" = the preset's."""
    options: Overrides = field(default_factory=dict)
    ttft_s: float = 0.0
    """SLO of the real-time requests, which say in turn what they prefer to a late answer; 0 = none."""
    choices: int = 1
    """Of every request."""
    window: int = 0
    """Of the model; 0: every position sees all before it."""
    beside: tuple[int, ...] = ()
    """Windows of groups of layers beside those with `window`, where the policies take groups."""
    stall_s: float = 20.0
    """The gateway's stall timeout."""
    limit_s: float = 400.0
    """Virtual seconds, after second 6, by which every request has ended."""

    @property
    def config(self) -> Config:
        groups = [{"role": role, "count": count} for role, count in self.workers.items()]
        return small(self.preset, self.options, {"workers": groups} if groups else {})

    def live(self, kind: type[World] = World, **more: Any) -> World:
        """Raises AssertionError if anything goes wrong, is answered wrongly or is left. `more`: of another `kind`."""
        config = self.config
        names = sorted(config.instance_roles)
        other = PLACEMENTS.get(self.placement)
        world = of_config(
            self.seed,
            config,
            placement=None if other is None else lambda: other(self.seed),
            blocks=self.blocks,
            host_blocks=self.host_blocks,
            run_failure_rate=self.failures,
            message_delay_s=self.delay_s,
            loss_rate=self.loss,
            repeat_rate=self.repeat,
            stall_timeout_s=self.stall_s,
            window=self.window,
            groups=(*self.beside, self.window) if self.beside and compose.groups_layers(config) else (),
            kind=kind,
            **more,
        )
        self._submit(world)
        strike(world, self.faults, leaving=names[self.seed % len(names)], cancelled=max(1, len(self.arrivals) // 3))
        world.run(6.0)
        world.run_until_quiet(self.limit_s)
        world.check_outputs()
        return world

    def _submit(self, world: World) -> None:
        random = Random(self.seed)
        prefix = tokens(random, 13)
        for index, (at_s, length, shared, most, traffic_class, lie) in enumerate(self.arrivals):
            prompt = ((prefix if shared else []) + tokens(random, length))[:length]
            predicted = lie * len(expected_output(prompt, most))
            asked = Asked(prompt, most, traffic_class, predicted)
            if self.ttft_s and traffic_class == "rt":
                asked = replace(
                    asked, slo=Slo(ttft_s=self.ttft_s, tpot_s=0.08), if_late=OUTCOMES[index % len(OUTCOMES)]
                )
            submit_at(world, at_s, f"r{index}", asked, self.choices)


def own_workers(preset: str, times: int = 1) -> dict[str, int]:
    return {group.role.value: group.count * times for group in small(preset).workers}


def cases(
    preset: str, *, options: st.SearchStrategy[Overrides] | None = None, elsewhere: bool = False
) -> st.SearchStrategy[Case]:
    """Cases of a preset's own workers once or twice and its own settings; or with options and, `elsewhere`, on other
    roles and under another placement, which may be any that computes all a request needs.

    Two placements stay: late binding, which alone places what was parked, and on workers of one role only, splitting.
    """
    policies = small(preset).policies
    pools: list[dict[str, int]] = [own_workers(preset), own_workers(preset, 2)]
    if elsewhere and policies.placement != "split":
        pools += [{"unified": 2}, {"prefill": 2, "decode": 2}]
    moves = elsewhere and policies.waiting_kv == "none"
    return st.sampled_from(pools).flatmap(
        lambda pool: st.builds(
            Case,
            preset=st.just(preset),
            arrivals=ARRIVALS,
            seed=st.integers(0, 2**32),
            faults=any_faults([f"{role}-{index}" for role in pool for index in range(pool[role])], most=5),
            workers=st.just(pool),
            blocks=st.sampled_from(CACHES),
            host_blocks=st.sampled_from([0, 6, 60]),
            failures=st.sampled_from([0.0, 0.1]),
            delay_s=st.sampled_from([0.002, 0.01, 0.05]),
            loss=st.sampled_from([0.0, 0.0, 0.01]),
            repeat=st.sampled_from([0.0, 0.0, 0.1]),
            placement=st.sampled_from(["", *PLACEMENTS]) if moves else st.just(""),
            window=st.sampled_from([0, 0, 1, 6, 13]),
            beside=st.sampled_from([(), (0,), (0, 6)]),
            options=st.just({}) if options is None else options,
        )
    )


def left_by_clients(
    preset: str, seed: int, blocks: int, *, shortest: int, arrival_s: Callable[[int, float], float]
) -> Case:
    """24 requests of both classes, of which clients leave. `shortest`: tokens of a response at least; `arrival_s`: by
    the request's number and a draw between 0 and 1."""
    random = Random(seed)
    arrivals = [
        (
            arrival_s(index, random.random()),
            random.randint(1, 20),
            random.random() < 0.3,
            random.randint(shortest, 30),
            random.choice(["rt", "be"]),
            random.choice([0.0, 0.5, 1.0, 2.0]),
        )
        for index in range(24)
    ]
    return Case(
        preset=preset,
        arrivals=arrivals,  # type: ignore[arg-type]
        seed=seed,
        faults=[("cancel", 1.2, 0.0), ("cancel", 1.6, 0.0)],
        blocks=blocks,
        host_blocks=40,
        delay_s=0.002,
    )
