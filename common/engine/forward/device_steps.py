"""Steps on a GPU: the order of launches, and the one wait at the end.

    host                                          device (one stream)
    batch ─▶ page-locked buffers ── launch ──▶    copy in · recorded step, or the forward kernel by kernel
                                                  · sample tokens · copy out · mark
    free for other work … wait for the mark  ◀──────────────────────────┘
    ─▶ StepOutput

Owned by the model runner and by `drafts/batch_drafts.py`, on a GPU; on a processor only in tests, which compare it with
the ordinary path. Everything of a step is launched without asking the device for anything, so the host waits for the
device exactly once a step; scored prompts, which are rare, are the exception. A step may be queued after one that still
runs: its tokens are then taken on the device, and host memory that the device copies from exists twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import structlog
import torch
from torch import Tensor

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.config.device_memory import STAGING_TOKENS
from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.device.streams import CudaStream, Mark, Stream, stream_for
from cohort.common.engine.device.uploads import Uploads
from cohort.common.engine.forward.static_decode import Ground, StaticDecode
from cohort.common.engine.forward.static_mixed import StaticMixed
from cohort.common.engine.models.lora import LoraStore
from cohort.common.engine.models.step_inputs import Model, Places, StepInputs, step_inputs
from cohort.common.engine.ranks.group_steps import GroupSteps
from cohort.common.engine.step.batch import StepBatch, StepOutput
from cohort.common.engine.step.decode_classes import (
    CaptureBudget,
    MixedClass,
    RecordedClasses,
    StepClass,
    capture_order,
    mixed_classes,
)
from cohort.common.engine.step.device_sampler import SampledOnDevice, sample_on_device
from cohort.common.engine.step.grammar_masks import TokenMasks
from cohort.common.engine.step.recorded_steps import PlainRecorder, Recorder
from cohort.common.engine.step.standing_inputs import awaited_tokens, put_tokens
from cohort.common.engine.step.verification import right_ones
from cohort.common.errors import InvariantViolated
from cohort.kernels.batch_invariance import fixed_products_made
from cohort.kernels.fp8_cache import is_fp8
from cohort.kernels.gpu import available as gpu
from cohort.kernels.gpu.plan import latent_group
from cohort.kernels.gpu.workspace import Workspace
from cohort.kernels.types import products_made

if TYPE_CHECKING:
    from cohort.kernels.gpu.variants import ServedExperts

log = structlog.get_logger(__name__)

LAUNCH_S = 12e-6
"""Host time of one launch from Python, a kernel's of torch or Triton's: 10 to 15 us."""
LEAN_LAUNCHES = 13
"""Launches per layer with prompt and decode rows: ten as in a decode step, gather, flash attention, copy of the
result."""
EXPERT_LAUNCHES = 15
"""Further launches per layer with a mixture of experts: routing, sorting, two grouped products, the weighted sum."""
LATENT_LAUNCHES = 5
"""Further launches per layer of latents: two products of all heads, the query's rotated part, two norms."""
GENERIC_LAUNCHES = 45
"""Launches per layer of a transformers model: one per operation of its Python code."""
FAST_BYTES_S, FAST_OPERATIONS_S = 4.3e12, 7.9e14
"""Rates of the order of an H200's. On a slower device its part is longer than estimated here: then a step is recorded
without need, padded to no more than twice its prompt tokens."""


@dataclass(slots=True, eq=False)
class Launched:
    _sampled: SampledOnDevice
    _mark: Mark
    _drafted: StepBatch | None = None
    _over: Callable[[], None] | None = None

    def finish(self) -> StepOutput:
        """Wait for the device and return its answer. All that the step wrote is then there, KV included. Any thread."""
        self._mark.wait()
        if self._over is not None:
            self._over()
        output = self._sampled.output()
        return output if self._drafted is None else right_ones(output, self._drafted)

    @property
    def tokens(self) -> Tensor | None:
        """Sampled tokens on the device, int64 [S]; for work that is queued after the step."""
        return self._sampled.on_device


class StepLimits(NamedTuple):
    """Maximum sizes of a step; `max_context`: positions of a row."""

    max_rows: int
    max_step_tokens: int
    max_context: int


class DeviceSteps:
    """Steps on a GPU: at most one runs, and one is queued after it (`launch` when the one before both has finished)."""

    def __init__(
        self,
        model: Model,
        geometry: ModelGeometry,
        kv: KvTensors,
        *,
        dtype: torch.dtype,
        limits: StepLimits,
        lora: LoraStore,
        places: Places | None = None,
        batch_invariant: bool = False,
        group: GroupSteps | None = None,
    ) -> None:
        """`geometry`: of what this process computes. `places`: of layers in several groups. `batch_invariant`: the
        model was made so (`kernels.batch_invariance`), and attention must be. `group`: of a rank of several."""
        device, (max_rows, max_step_tokens, max_context) = kv.device, limits
        self._group = group
        self._batch_invariant = batch_invariant
        self._places = places
        self._model, self._kv, self._geometry = model, kv, geometry
        self._device, self._dtype, self._max_rows, self._lora = device, dtype, max_rows, lora
        self.stream: Stream = stream_for(device)
        self._uploads, self._other_uploads = Uploads(device), Uploads(device)
        self._last: Launched | None = None
        self._states: Tensor | None = None
        self._workspace: Workspace | None = None
        self._on_gpu = gpu.ops_for(kv.blocks) is not None
        if self._on_gpu:
            self._workspace = self._made_workspace(max_step_tokens)
        estimated = geometry if group is None else group.widest
        ground = Ground(model, kv.with_spare, kv.spare_block, max_context, device, self._workspace, places)
        classes = mixed_classes(
            max_rows, max_step_tokens, lambda tokens: launching_takes_longer(estimated, dtype.itemsize, tokens)
        )
        self.decode = StaticDecode(ground, max_rows, geometry.vocab_size)
        self.mixed = StaticMixed(ground, classes)
        if device.type == "cuda":  # weights and cache were written on another stream
            torch.cuda.synchronize(device)

    @property
    def unstaged_rows(self) -> int:
        """Prefill rows whose step's contexts were too long to be gathered for flash attention."""
        return 0 if self._workspace is None else self._workspace.unstaged_rows

    def _made_workspace(self, max_step_tokens: int) -> Workspace:
        """Allocate the workspace; that of latents has no room to gather them, since flash attention takes none."""
        g = self._geometry
        kv_heads, head_dim, staging = g.num_kv_heads, g.head_dim, max(max_step_tokens, STAGING_TOKENS)
        if g.latent is not None:
            kv_heads = g.num_heads // latent_group(g.num_heads, self._dtype.itemsize)
            head_dim, staging = g.latent.rank, 0
        return Workspace(
            max_rows=self._max_rows,
            query_heads=g.num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=self._dtype,
            device=self._device,
            staging_tokens=staging,
            batch_invariant=self._batch_invariant,
        )

    def compile(self, threads: int) -> None:
        """Compile every kernel that a step can launch, so that none of them is compiled while requests wait."""
        if not self._on_gpu:
            return
        from cohort.kernels.gpu import variants

        g = self._geometry
        latent = g.latent
        served = variants.Served(
            query_heads=g.num_heads,
            kv_heads=g.num_kv_heads,
            head_dim=g.head_dim,
            hidden=g.hidden_size,
            inner=g.intermediate_size,
            vocabulary=g.vocab_size,
            dtype=self._dtype,
            block_size=self._kv.geometry.block_size,
            rotary_half=g.rotary_dim // 2 if g.family in ("llama", "moe", "gemma", "gpt_oss") else 0,
            windowed=frozenset(window > 0 for window in g.sliding_windows) or frozenset({False}),
            sinks=g.attention_sinks,
            capped=g.attention_softcap > 0,
            experts=self._served_experts(),
            products=products_made(),
            layers=g.num_layers,
            fp8=is_fp8(self._kv.blocks),
            wide_norms=g.family in ("gemma", "gpt_oss"),
            batch_invariant=self._batch_invariant,
            fixed=fixed_products_made(),
            gelu=g.family == "gemma",
            latents=None if latent is None else variants.ServedLatents(latent.rank, latent.rotated, latent.query_rank),
        )
        variants.compilations.watch()
        variants.precompile(served, self._max_rows, self._device, threads)

    def _served_experts(self) -> ServedExperts | None:
        mixture = self._geometry.experts
        if mixture is None or self._geometry.family not in ("moe", "gpt_oss", "deepseek"):
            return None
        from cohort.kernels.gpu import variants

        return variants.ServedExperts(
            mixture.count,
            mixture.per_token,
            mixture.inner_size,
            shared_inner=mixture.shared_inner_size,
            rounded=self._geometry.model_type != "mixtral" and self._geometry.family != "deepseek",
            clamped=self._geometry.family == "gpt_oss",
        )

    def record(self, budget_bytes: int, classes: Sequence[int] | None = None) -> RecordedClasses:
        """Record the decode steps, only of the batch sizes `classes` if given, then steps with prompts; nothing may be
        served meanwhile. Zero bytes: none are recorded. All ranks of a group at once."""
        if self._group is not None:
            wanted = None if classes is None else capture_order(classes)
            budget_bytes = self._group.budget(budget_bytes, (self._max_rows, wanted, self.mixed.pending_classes))
        if not budget_bytes:
            return self.recorded
        recorder = PlainRecorder()
        if isinstance(self.stream, CudaStream):
            from cohort.common.engine.step.cuda_graphs import CudaGraphRecorder

            recorder = CudaGraphRecorder(self._device, self.stream.stream)
        # The first recording makes the pool: it holds at least the widest intermediate and the logits.
        g = self._geometry
        estimate = self._max_rows * (2 * g.intermediate_size + self._expert_width() + g.vocab_size) * 4
        budget = CaptureBudget(budget_bytes)
        used: Recorder = recorder if self._group is None else self._group.recorder(recorder)
        with self.stream.use():
            self.decode.record(used, budget, estimate, classes)
            if self.decode.classes:  # else nothing can be recorded here
                self.mixed.record(used, budget, self._mixed_estimate())
        self.stream.mark().wait()
        return self.recorded

    @property
    def recorded(self) -> RecordedClasses:
        return RecordedClasses(self.decode.classes, self.mixed.classes)

    def forget(self) -> None:
        """Drop what is recorded: from now on every step runs kernel by kernel."""
        self.decode.forget()
        self.mixed.forget()

    def _mixed_estimate(self) -> int:
        """Return what the largest class adds to the pool: a layer's intermediates, twice."""
        g, tokens = self._geometry, max((each.tokens for each in self.mixed.pending_classes), default=0)
        width = 2 * g.intermediate_size + self._expert_width() + 4 * g.hidden_size
        return 2 * tokens * width * self._dtype.itemsize

    def _expert_width(self) -> int:
        """Return the width of what a token's experts compute; 0 in a model without experts."""
        mixture = self._geometry.experts
        return 0 if mixture is None else mixture.per_token * (mixture.inner_size + self._geometry.hidden_size)

    def launch(self, batch: StepBatch, masks: Callable[[], TokenMasks | None] = lambda: None) -> Launched:
        """Start a step without scored prompts. `masks` is called while the device computes the forward. With a
        `token_source` it is queued after the step that was launched last."""
        try:
            self._last = self._launch(batch, masks)
        except Exception as error:
            if self._group is not None:
                self._group.out_of_step(error)
            elif isinstance(error, torch.OutOfMemoryError):
                self.stream.mark().wait()  # what was launched still reads this step's inputs
                raise
            self._last = None  # nothing can run behind it
            raise
        return self._last

    def _launch(self, batch: StepBatch, masks: Callable[[], TokenMasks | None]) -> Launched:
        before, last = None, self._last
        if batch.token_source is not None:
            before = None if last is None else last.tokens
            if before is None:
                raise InvariantViolated("a step behind another one, but none was launched")
        over = None if self._group is None else self._group.begin()
        with self.stream.use():
            self._next_uploads()
            taken = self._taken(batch)
            if self._group is not None:
                self._group.broadcast(batch, taken, before)
            if not isinstance(taken, int):
                logits = self._mixed_logits(batch, taken, before)
                self._apply_last_tokens(batch, last)
            else:
                done = self.decode.run(batch, taken, before)
                self._states = None if done.states is None else self._of_sampled(done.states, batch)
                self._apply_last_tokens(batch, last)
                if not batch.grammars and (sampled := self.decode.sample(batch, taken, done)) is not None:
                    return Launched(sampled, self.stream.mark(), None, over)
                logits = self._of_sampled(done.logits, batch)
            sampled = sample_on_device(logits, batch.sampling, self._uploads, masks())
            return Launched(sampled, self.stream.mark(), None if batch.drafts is None else batch, over)

    def follow(self, batch: StepBatch, taken: StepClass, awaited: int) -> None:
        """Start a step of rank 0 up to its logits, on another rank; `awaited` as in `rank_messages.Step`. Returns when
        the one before is over. Raises `InvariantViolated` if this rank has not recorded the class."""
        assert self._group is not None, "a device by itself follows nobody"
        self._group.wait_for_room()
        if taken is not None and taken not in (*self.decode.classes, *self.mixed.classes):
            raise InvariantViolated(f"rank 0 replays {taken}, which this rank has not recorded")
        over = self._group.begin()
        with self.stream.use():
            self._next_uploads()
            before = self._group.taken_over(awaited, self._device)
            if isinstance(taken, int):
                self.decode.run(batch, taken, before)
            else:
                self._mixed_logits(batch, taken, before)
            self._group.under_way(self.stream.mark(), over)

    def _next_uploads(self) -> None:
        self._uploads, self._other_uploads = self._other_uploads, self._uploads
        self._uploads.restart()

    def _taken(self, batch: StepBatch) -> StepClass:
        """Return the class that computes a batch. A step with adapters runs by kernels: recordings know none."""
        if batch.adapters:
            return None
        rows_class = self.decode.takes(batch)
        return self.mixed.takes(batch) if rows_class is None else rows_class

    @staticmethod
    def _apply_last_tokens(batch: StepBatch, last: Launched | None) -> None:
        """Apply the last step's tokens, if penalties or grammars need them, while the device computes the forward."""
        if batch.needs_last_tokens and last is not None:
            batch.apply_last_tokens(last.finish().tokens)

    def _mixed_logits(self, batch: StepBatch, mixed: MixedClass | None, before: Tensor | None) -> Tensor:
        """Return the logits of a step's sampled rows, recorded or kernel by kernel."""
        if mixed is not None:
            done = self.mixed.run(batch, mixed, before)
            sampled = batch.num_sampled
            self._states = None if done.states is None else done.states[:sampled]
            return done.logits[:sampled]
        inputs = self._inputs(batch)
        if before is not None and batch.token_source is not None:
            sources, places = self._uploads.put(list(awaited_tokens(batch.token_source)))
            put_tokens(inputs.token_ids, before, sources, places, len(sources))
        logits = self._model.forward(inputs, self._kv.blocks)
        self._states = self._model.sampled_states
        return logits

    def with_tokens(self, batch: StepBatch) -> StepBatch:
        """Return a batch queued after the last launched step with its tokens, once that step is over."""
        return batch if batch.token_source is None or self._last is None else batch.after(self._last.finish().tokens)

    def _of_sampled(self, rows: Tensor, batch: StepBatch) -> Tensor:
        """Return the sampled ones of a recorded step's rows: all but prompt tokens before the last."""
        rows = rows[: batch.num_rows]
        if len(batch.sample_rows) == batch.num_rows:
            return rows
        (index,) = self._uploads.put([batch.sample_rows.astype("int64")])
        return rows.index_select(0, index)

    def scoring_inputs(self, batch: StepBatch) -> StepInputs:
        """Return the inputs of a step that the caller runs itself, on `stream`; of several ranks all get it then."""
        if self._group is not None:
            self._group.broadcast(batch, None)
            self.stream.mark().wait()  # a follower's step may end a little after rank 0's
        self._uploads.restart()
        self._states = self._last = None
        return self._inputs(batch)

    def sampled_states(self) -> Tensor | None:
        return self._states

    def _inputs(self, batch: StepBatch) -> StepInputs:
        inputs = step_inputs(
            batch,
            self._kv.geometry.block_size,
            self._device,
            self._uploads,
            self._workspace,
            self._max_rows,
            self._places,
        )
        inputs.lora = self._lora.step(batch, self._uploads.put)
        return inputs


def launch_s(geometry: ModelGeometry) -> float:
    """Return the host time for all layers of a step with prompts that is not recorded."""
    launches = GENERIC_LAUNCHES if geometry.family == "generic" else LEAN_LAUNCHES
    if geometry.family == "deepseek":
        launches += LATENT_LAUNCHES
    if geometry.family in ("moe", "gpt_oss", "deepseek"):
        launches += EXPERT_LAUNCHES
    return geometry.num_layers * (launches + 2 * geometry.qk_norm) * LAUNCH_S


def device_s(geometry: ModelGeometry, element_bytes: int, tokens: int) -> float:
    """Return a lower bound of a fast GPU's time for a step's products of `tokens` tokens, without attention."""
    g = geometry
    matrices = 2 if g.family == "opt" else 3
    layer = g.hidden_size * ((2 * g.num_heads + 2 * g.num_kv_heads) * g.head_dim + matrices * g.intermediate_size)
    weights = layer * g.num_layers
    products_s = max(weights * element_bytes / FAST_BYTES_S, 2.0 * weights * tokens / FAST_OPERATIONS_S)
    return products_s + g.hidden_size * g.vocab_size * element_bytes / FAST_BYTES_S


def launching_takes_longer(geometry: ModelGeometry, element_bytes: int, tokens: int) -> bool:
    """Return whether the device would wait for the host in a step of `tokens` tokens, some of them of prompts. The
    numbers were counted or estimated, not measured on a GPU; a wrong one costs time, never a token."""
    return launch_s(geometry) > device_s(geometry, element_bytes, tokens)
