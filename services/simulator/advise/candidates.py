"""The set-ups that `cohort advise` compares: presets, splits between roles, groups of devices, chunks of prompts.

Every one can be configured and has memory; what cannot is counted with its reason. `ceiling` bounds what a group of
devices can keep whatever decides.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import msgspec

from cohort.common.config import CONFIGS_DIR, Config
from cohort.common.errors import ConfigError
from cohort.common.policies.compose import groups_layers
from cohort.common.policies.cost_model import ModelShape, StepWork, prefill_pairs
from cohort.common.types import Role
from cohort.common.workloads.items import WorkItem
from cohort.services.simulator.core.cluster import cost_model
from cohort.services.simulator.core.deployment import kv_blocks, spread_roles
from cohort.services.simulator.core.setup import configuration
from cohort.services.simulator.hardware.data_files import read_yaml
from cohort.services.simulator.hardware.hardware import Cluster, as_stored

DEFAULT_PRESET = Config().name
BASELINE = "baseline-"
"""Prefix of presets that exist to be compared with."""
_CHUNKS = (512, 2048)
_GROUPS = (1, 2, 4, 8)
_COLUMNS_OF_CODES = 32
"""Columns of an expert in MXFP4 that share a scale: `MXFP4_GROUP` of the engine, whose code is not imported here."""
_PREFILL_SHARES = (0.125, 0.25, 0.5, 0.75, 0.875)
_NEARLY = 0.9
"""Share of a bound that counts as kept: iterations may scatter."""

Refuse = Callable[[str, ConfigError], None]
"""Callback for what cannot run: a name, and the reason."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """`cluster`: with the instances that groups of `tensor_parallel` devices make."""

    preset: str
    cluster: Cluster
    roles: dict[Role, int]
    settings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        roles = ", ".join(f"{count} {role.value}" for role, count in self.roles.items())
        group = f" x {self.cluster.tensor_parallel} devices" if self.cluster.tensor_parallel > 1 else ""
        return f"{self.preset} ({roles}{group}){''.join(' ' + setting for setting in self.settings)}"

    @property
    def plain(self) -> Candidate:
        """The candidate with the preset's own settings."""
        return replace(self, settings=())

    @property
    def simplicity(self) -> tuple[int, int, bool, int, int, str]:
        """Sort key, smaller is simpler: devices of a group, settings, not the default preset, roles, options."""
        other = self.preset != DEFAULT_PRESET
        return (
            self.cluster.tensor_parallel,
            len(self.settings),
            other,
            len(self.roles),
            _options_of(self.preset),
            self.preset,
        )


def candidates(
    options: argparse.Namespace, presets: Sequence[str], cluster: Cluster, model: ModelShape, refuse: Refuse
) -> list[Candidate]:
    """Return all set-ups that can run."""
    fixed, whole = options.tensor_parallel is not None, undivided(model)
    if whole and not fixed and len(groups(cluster, model, fixed=False)) > 1:
        refuse("groups of devices", ConfigError(f"{whole}; --tensor-parallel N simulates groups of N all the same"))
    return [
        candidate
        for grouped in groups(cluster, model, fixed=fixed or bool(whole))
        for preset in presets
        for candidate in _of_preset(options, preset, grouped, model, refuse)
    ]


def _of_preset(
    options: argparse.Namespace, preset: str, cluster: Cluster, model: ModelShape, refuse: Refuse
) -> Iterator[Candidate]:
    try:
        config = configuration(options, preset)
        model = as_stored(model, config, cluster)
        geometry = model.kv_geometry(config.kv.block_size, grouped=groups_layers(config))
        kv_blocks(config, cluster, model, geometry)
        splits = list(_splits(config, cluster.instances))
    except ConfigError as error:
        refuse(preset, error)
        return
    for roles in splits:
        yield Candidate(preset, cluster, roles)


def chunked(options: argparse.Namespace, candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with other chunks of prompts than its preset's."""
    own = configuration(options, candidate.preset, candidate.settings).engine
    for chunk in _CHUNKS:
        if chunk != own.prefill_chunk:
            settings = [f"engine.prefill_chunk={chunk}"]
            if chunk > own.max_step_tokens:
                settings.append(f"engine.max_step_tokens={chunk}")
            yield replace(candidate, settings=tuple(settings))


def ceiling(cluster: Cluster, model: ModelShape, items: Sequence[WorkItem], *, drafts: bool) -> float:
    """Return the share of the requests whose SLO an idle cluster could keep, each alone in one iteration for its prompt
    and one for each token. Prompts that may be cached, and tokens with `drafts`, count as in time."""
    costs = [cost_model(model, part) for part in cluster.parts or (cluster,)]

    def fits(item: WorkItem) -> bool:
        prompt, slo = item.prompt_tokens, item.slo
        first = StepWork(prompt, 1, 1, prefill_pairs(0, prompt), prompt)
        later = StepWork(1, 1, 1, decode_rows=1, decode_context=prompt, longest_context=prompt)
        cached = item.hash_ids or item.session
        in_ttft = not slo.ttft_s or cached or _NEARLY * min(cost.step_s(first) for cost in costs) <= slo.ttft_s
        if not slo.tpot_s or drafts or item.output_tokens < 2:
            return bool(in_ttft)
        return bool(in_ttft) and _NEARLY * min(cost.step_s(later) for cost in costs) <= slo.tpot_s

    return sum(fits(item) for item in items) / len(items)


def undivided(model: ModelShape) -> str:
    """Return why no live worker computes this model on several devices, as far as its shape shows
    (`rank_shares.hindrance` reads its configuration); "" where one does."""
    return "" if model.gated_mlp else f"{model.name} is not Llama-shaped, which live workers do not divide over devices"


def groups(cluster: Cluster, model: ModelShape, *, fixed: bool) -> list[Cluster]:
    """Return the cluster with its devices in groups of every size that host and heads allow; unchanged where its groups
    are given, or it has no links for them (CPUs, unlike instances)."""
    if fixed or cluster.cpu or cluster.parts:
        return [cluster]
    devices, own = cluster.instances * cluster.tensor_parallel, cluster.tensor_parallel
    host = (cluster.per_host or cluster.instances) * own
    return [
        msgspec.structs.replace(
            cluster, instances=devices // size, tensor_parallel=size, per_host=cluster.per_host * own // size
        )
        for size in sorted({*_GROUPS, own})
        if host % size == 0 and devices % size == 0 and _divides(model, size)
    ]


def _divides(model: ModelShape, size: int) -> bool:
    """Check heads, of which KV heads may be copied, and experts' columns: codes divide by whole groups that share a
    scale, of which some devices have one more."""
    copied = model.kv_heads % size == 0 or size % model.kv_heads == 0
    if model.expert_bits and model.expert_intermediate // _COLUMNS_OF_CODES < size:
        return False
    columns = 0 if model.expert_bits else model.expert_intermediate
    return copied and not any(each % size for each in (model.heads, columns, model.shared_intermediate))


def _splits(base: Config, instances: int) -> Iterator[dict[Role, int]]:
    """Yield the preset's own shares, and for prefill beside decode others too."""
    own = spread_roles(base, instances)
    yield own
    if set(own) == {Role.PREFILL, Role.DECODE}:
        counts = {min(instances - 1, max(1, round(share * instances))) for share in _PREFILL_SHARES}
        for prefills in sorted(counts - {own[Role.PREFILL]}):
            yield {Role.PREFILL: prefills, Role.DECODE: instances - prefills}


@cache
def _options_of(preset: str) -> int:
    """Count the options that the preset's file sets; 0 where there is none."""
    path = CONFIGS_DIR / "presets" / f"{preset}.yaml"
    sections = read_yaml(path).values() if path.is_file() else ()
    return sum(len(section) if isinstance(section, dict) else 1 for section in sections)
