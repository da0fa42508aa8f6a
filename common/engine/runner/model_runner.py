"""One model on one device with its KV cache: executes a step, and nothing else. On a GPU by `device_steps`.

Owned by a worker's engine thread, which calls `execute` once per iteration; also used by the profiler. Decides nothing
about requests, blocks or order. torch releases the GIL inside its operators, so the event loop runs on during a step.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import structlog
import torch
from torch import Tensor

from cohort.common.engine.cache.kv_tensors import KvTensors
from cohort.common.engine.config.device_memory import DeviceShare, kv_bytes, step_bytes
from cohort.common.engine.config.lora_checkpoint import LoraOptions, check_lora
from cohort.common.engine.config.model_config import (
    DTYPE_BYTES,
    FP8_PLANES,
    SCALE_BYTES,
    ModelGeometry,
    kv_dtype,
    read_geometry,
)
from cohort.common.engine.config.rank_shares import check_degree, exchange_bytes
from cohort.common.engine.config.runner_options import RunnerOptions
from cohort.common.engine.device import compiled_kernels
from cohort.common.engine.device.device_name import TORCH_DTYPES, resolve_device, resolve_dtype
from cohort.common.engine.device.streams import HostStream, Stream
from cohort.common.engine.drafts.batch_drafts import BatchDrafter
from cohort.common.engine.forward.device_steps import DeviceSteps, Launched, StepLimits
from cohort.common.engine.models.generic import GenericModel
from cohort.common.engine.models.lean_llama import LeanLlama
from cohort.common.engine.models.lora import LoraStore, host_put
from cohort.common.engine.models.model_files import Loading
from cohort.common.engine.models.model_forms import check_invariant, load_model
from cohort.common.engine.models.step_inputs import StepInputs, step_inputs
from cohort.common.engine.ranks.followers import Followers
from cohort.common.engine.ranks.group_steps import GroupSteps
from cohort.common.engine.ranks.ranks import RankComm, RankSettings
from cohort.common.engine.step.batch import Int64Array, SamplingRow, StepBatch, StepOutput, TokenLogprobs, trial_batch
from cohort.common.engine.step.decode_classes import RecordedClasses, StepClass
from cohort.common.engine.step.grammar_masks import GrammarMasks, TokenMasks
from cohort.common.engine.step.pooling import pooled_tokens, sums
from cohort.common.engine.step.prompt_scores import by_row, score, scored_tokens
from cohort.common.engine.step.sampler import sample
from cohort.common.engine.step.verification import joined, sample_drafted
from cohort.common.engine.transfer.transfer_memory import STAGING_BYTES
from cohort.common.errors import ConfigError, InvariantViolated, ModelError
from cohort.common.kv.layer_groups import in_groups, layer_groups
from cohort.common.policies.kv_interface import KvCopy
from cohort.common.types import KvGeometry
from cohort.kernels.batch_invariance import batch_invariant as invariance

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    output: StepOutput

    def finish(self) -> StepOutput:
        return self.output


class ModelRunner:
    def __init__(
        self,
        model_dir: Path,
        options: RunnerOptions,
        group: RankSettings | None = None,
        followers: Followers | None = None,
    ) -> None:
        """Load the model. Raises `ModelError` or `ConfigError`. `group`: this is one rank of a worker, whose
        `followers` rank 0 has; blocks are counted as the worker's."""
        compiled_kernels.keep_in_cache()
        self.device = resolve_device(options.device)
        self.geometry: ModelGeometry = read_geometry(model_dir)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.dtype = resolve_dtype(options.dtype, self.device)
        self.kv_dtype = kv_dtype(options.cache_dtype, self.dtype, self.geometry, self.device.type)
        self.batch_invariant, degree = options.batch_invariant, 1 if group is None else group.degree
        if self.batch_invariant:
            threads = options.threads or torch.get_num_threads()
            check_invariant(self.geometry, self.device, self.dtype, ranks=degree, threads=threads, model=model_dir.name)
        self.ranks: RankComm | None = None
        self.followers = followers
        if group is not None:
            check_degree(self.geometry, degree, model_dir.name)
            self.ranks = RankComm(group, self.geometry, self.device)
        self._group = None if self.ranks is None else GroupSteps(self.ranks, followers)
        self.block_size = options.block_size
        groups = layer_groups(self.geometry.sliding_windows) if options.grouped else None
        self._places = None if groups is None else groups.places
        self.max_rows, self.max_step_tokens = options.max_rows, options.max_step_tokens
        self._model_dir = model_dir
        self.drafter: BatchDrafter | None = None  # its maker's to load, beside this one
        self._grammars: GrammarMasks | None = None
        self._sampled: Int64Array | None = None
        """Tokens of the last step, if the host has them when it is launched."""
        self.oom_retries = 0  # steps the device refused memory for and that ran in halves
        self._threads = options.threads
        self._prepared_thread = 0
        self._prepare_thread()
        self.lora, self._lora_bytes = self._lora_store(options.lora)
        with torch.inference_mode(), invariance(self.batch_invariant):
            load = Loading(
                model_dir,
                self.geometry,
                device=self.device,
                dtype=self.compute_dtype,
                max_rows=self.max_rows,
                max_step_tokens=self.max_step_tokens,
                weights=options.weights,
                ranks=self.ranks,
                rounding=options.rounding,
            )
            self._model = load_model(load)
        if self.ranks is not None:
            self.ranks.connect()
        on_device = self.device.type == "cuda" if options.device_steps is None else options.device_steps
        self.kv = self._made_cache(options, on_device)
        self._graph_bytes = options.share.graphs
        if on_device and isinstance(self._model, GenericModel) and self._model.unrecordable:
            self._graph_bytes = 0
            log.warning("steps cannot be recorded", model=model_dir.name, operations=list(self._model.unrecordable))
        self._device_steps = self._made_steps(options.max_context) if on_device else None
        log.info(
            "model loaded",
            model=model_dir.name,
            family=self.geometry.family,
            dtype=self.dtype,
            quantization="none" if self.geometry.quantization is None else self.geometry.quantization.method,
            device=str(self.device),
            kv_dtype=self.kv_dtype,
            kv_blocks=len(self.kv.blocks),
            kv_mebibytes=len(self.kv.blocks) * self.kv.block_bytes >> 20,
            host_blocks=options.host_blocks,
            kv_groups=self.kv.geometry.groups,
        )

    def _made_cache(self, options: RunnerOptions, on_device: bool) -> KvTensors:
        num_blocks = options.num_blocks or self._blocks_that_fit(options.share)
        return KvTensors(
            self._block_geometry(self._rank_geometry),
            num_blocks=num_blocks if self.ranks is None else self.ranks.all_min(num_blocks),
            host_blocks=options.host_blocks,
            dtype=torch.uint8 if self.kv_dtype in SCALE_BYTES else self.compute_dtype,
            device=self.device,
            spare=on_device,
            latent=self.geometry.latent is not None,
            apart=self.kv_dtype == FP8_PLANES,
        )

    def _made_steps(self, max_context: int) -> DeviceSteps:
        longest = min(max_context or self.geometry.max_positions, self.geometry.max_positions)
        positions = self.kv.geometry.positions(len(self.kv.blocks))
        return DeviceSteps(
            self._model,
            self._step_geometry,
            self.kv,
            dtype=self.compute_dtype,
            limits=StepLimits(self.max_rows, self.max_step_tokens, min(longest, positions)),
            lora=self.lora,
            places=self._places,
            batch_invariant=self.batch_invariant,
            group=self._group,
        )

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype that the model computes in. Its KV may be stored in fewer bits."""
        return TORCH_DTYPES[self.dtype]

    @property
    def _rank_geometry(self) -> ModelGeometry:
        """Geometry of the part of the model that this rank holds."""
        return self.geometry if self.ranks is None else self.ranks.share.own

    @property
    def _step_geometry(self) -> ModelGeometry:
        """Geometry of a step's intermediates on this rank."""
        return self.geometry if self.ranks is None else self.ranks.share.working

    @property
    def block_geometry(self) -> KvGeometry:
        """Geometry of a block over all ranks."""
        return self._block_geometry(self.geometry)

    def _block_geometry(self, model: ModelGeometry) -> KvGeometry:
        whole = model.kv_geometry(self.kv_dtype, self.block_size)
        return whole if self._places is None else in_groups(whole, model.sliding_windows)

    @property
    def stream(self) -> Stream:
        """Stream of the steps; other work on the device is ordered against it."""
        return HostStream() if self._device_steps is None else self._device_steps.stream

    @property
    def samples_on_device(self) -> bool:
        return self._device_steps is not None

    @property
    def captured_batch_sizes(self) -> tuple[int, ...]:
        """Row counts whose decode steps are recorded; none on a processor, or if recording failed."""
        return () if self._device_steps is None else self._device_steps.decode.classes

    @property
    def unstaged_rows(self) -> int:
        """Prefill rows whose step's contexts were too long for flash attention; 0 on a processor."""
        return 0 if self._device_steps is None else self._device_steps.unstaged_rows

    def execute(self, batch: StepBatch) -> StepOutput:
        """Compute one step: write its tokens' KV, sample the next tokens of their rows."""
        return self.launch(batch).finish()

    def launch(self, batch: StepBatch) -> Launched | Done:
        """Start a step; its `finish`, on any thread, waits for it. On a processor it is done when this returns. With a
        `token_source` it runs after the last launched one, which may not have finished; the one before must have."""
        before, self._sampled = self._sampled, None
        try:
            if before is not None:
                batch = batch.after(before)
            launched = self._begin(batch)
        except torch.OutOfMemoryError:
            if batch.num_rows < 2 or self.ranks is not None:
                raise
            batch = batch if self._device_steps is None else self._device_steps.with_tokens(batch)
            launched = Done(self._in_halves(batch))
        if isinstance(launched, Done):
            self._sampled = launched.output.tokens
        return launched

    def remote_copies(self, copies: Sequence[KvCopy]) -> AbstractContextManager[None]:
        """Return a context in which a plan's copies are made by the other ranks too, and its rows come after them."""
        return nullcontext() if self._group is None or not copies else self._group.copies(copies)

    def follow(self, batch: StepBatch, taken: StepClass = None, awaited: int = 0) -> None:
        """Run the forward of rank 0's step on another rank: the same calls in the same order; the rest as in
        `rank_messages.Step`. On a GPU it may still run when this returns."""
        self._prepare_thread()
        steps = self._device_steps
        with torch.inference_mode(), self.stream.use():
            if steps is not None and not batch.beyond_sampling:
                steps.follow(batch, taken, awaited)
                return
            if steps is None:
                inputs = step_inputs(batch, self.block_size, self.device, places=self._places)
            else:
                inputs = steps.scoring_inputs(batch)
            for _ in self._forwards(batch, inputs) if batch.scoring else (self._forward(inputs),):
                pass
            self.stream.mark().wait()

    def _begin(self, batch: StepBatch) -> Launched | Done:
        self._prepare_thread()
        if batch.grammars and self._grammars is not None:
            self._grammars.prepare(batch.grammars, batch.sampling)
        with torch.inference_mode():
            steps = None if batch.beyond_sampling else self._device_steps
            started = Done(self._execute(batch)) if steps is None else steps.launch(batch, lambda: self._masks(batch))
            if self.drafter is not None:
                self.drafter.ran(batch)
            return started

    def _in_halves(self, batch: StepBatch) -> StepOutput:
        """Run the rows in two halves, if the device refuses memory although admission should prevent it."""
        self.oom_retries += 1
        torch.cuda.empty_cache()
        first, second = batch.split()
        log.warning("device refused memory; step runs in halves", rows=batch.num_rows, tokens=batch.num_tokens)
        outputs = self.execute(first), self.execute(second)
        return joined(*outputs)

    def use_grammars(self) -> None:
        """Read the tokenizer for requests with a grammar: a few tenths of a second, for which none should wait."""
        self._grammars = GrammarMasks.of_model(self._model_dir, self.geometry.eos_token_ids, self.geometry.vocab_size)

    def one_by_one(self) -> AbstractContextManager[None]:
        """Return a context in which a step's kernels are called one by one, for measuring them."""
        return self._model.one_by_one() if isinstance(self._model, LeanLlama) else nullcontext()

    def warm_up(self, classes: Sequence[int] | None = None) -> None:
        """Run the step shapes that occur, so that the first request does not pay for code and caches being made. Writes
        KV into the first blocks: call it before any request owns one. On a GPU this is also when kernels are compiled
        and the decode steps recorded; `classes`: of these batch sizes only, for measuring."""
        if self._device_steps is not None:
            if self.followers is None:
                self.compile_steps()
                self.record_steps(classes)
            else:
                self.followers.ready_steps(self.compile_steps, lambda: self.record_steps(classes), classes)
        if self.drafter is not None:
            self.drafter.warm_up()
        for rows, tokens_per_row in ((1, 1), (1, min(64, self.max_step_tokens)), (min(8, self.max_rows), 1)):
            batch = trial_batch(
                rows,
                tokens_per_row,
                tokens_per_row,
                block_size=self.block_size,
                num_blocks=len(self.kv.blocks),
                groups=self.kv.geometry.num_groups,
            )
            if batch is not None:
                self.execute(batch)

    def use_threads(self, threads: int) -> None:
        """Compute with so many OpenMP threads from the next step on."""
        if threads != self._threads:
            self._threads, self._prepared_thread = threads, 0

    def compile_steps(self) -> None:
        if self._device_steps is not None:
            with torch.inference_mode():
                self._device_steps.compile(threads=min(16, os.cpu_count() or 1))

    def record_steps(self, classes: Sequence[int] | None = None) -> RecordedClasses:
        """Record steps as far as memory allows. Of several ranks all do it at once."""
        if (steps := self._device_steps) is None:
            return RecordedClasses()
        with torch.inference_mode():
            if self.ranks is not None:
                self.ranks.reserve(self.max_step_tokens, self.max_rows, self.compute_dtype)
            recorded = steps.record(self._graph_bytes, classes)
        for each in (self._model, self.ranks):
            if recorded.decode and isinstance(each, LeanLlama | RankComm):
                each.freeze_buffers()
        return recorded

    def _execute(self, batch: StepBatch) -> StepOutput:
        if batch.token_source is not None:
            raise InvariantViolated("a step behind another one, of which no tokens are known")
        if (steps := self._device_steps) is not None:
            with steps.stream.use():
                output = self._compute(batch, steps.scoring_inputs(batch))
            steps.stream.mark().wait()
            return output
        if self._group is not None:
            self._group.broadcast(batch, None)
        inputs = step_inputs(batch, self.block_size, self.device, places=self._places)
        inputs.lora = self.lora.step(batch, host_put(self.device))
        return self._compute(batch, inputs)

    def _compute(self, batch: StepBatch, inputs: StepInputs) -> StepOutput:
        if batch.pooling:
            inputs.state_index = pooled_tokens(batch.pooling, self.device)
        scored = bool(batch.scoring)
        output = self._execute_and_score(batch, inputs) if scored else self._sample(self._forward(inputs), batch)
        if not batch.pooling:
            return output
        assert inputs.states is not None, "a model's forward left no states"
        return dataclasses.replace(output, pooled=sums(inputs.states, batch.pooling))

    @property
    def keeps_states(self) -> LeanLlama | None:
        """Model whose final states can be stored for a head; None if this model's cannot."""
        return self._model if isinstance(self._model, LeanLlama) else None

    def _sample(self, logits: Tensor, batch: StepBatch) -> StepOutput:
        if batch.drafts is None:
            return sample(logits, batch.sampling, self._masks(batch))
        return sample_drafted(logits, batch, self._masks_of)

    def _masks(self, batch: StepBatch) -> TokenMasks | None:
        return self._masks_of(batch.sampling) if batch.grammars else None

    def _masks_of(self, rows: Sequence[SamplingRow]) -> TokenMasks | None:
        if self._grammars is None:  # made at start where requests may have some; a test or a tool may have the first
            self.use_grammars()
        assert self._grammars is not None
        return self._grammars.of(rows)

    def _execute_and_score(self, batch: StepBatch, inputs: StepInputs) -> StepOutput:
        """Compute a step and score its prompts. A whole prompt's logits may exceed the device, so those of `max_rows`
        tokens exist at a time. For more the forward runs again over the same tokens: it writes the same KV."""
        sampled = len(inputs.sample_index)
        pairs = ((target, row.top) for row in batch.scoring for target in row.targets)
        scores: list[TokenLogprobs] = []
        output: StepOutput | None = None
        for logits in self._forwards(batch, inputs):
            if output is None:
                output = self._sample(logits[:sampled], batch)
                logits = logits[sampled:]
            scores += score(logits, pairs)
        assert output is not None
        return dataclasses.replace(output, scores=by_row(batch.scoring, scores))

    def _forwards(self, batch: StepBatch, inputs: StepInputs) -> Iterator[Tensor]:
        wanted = torch.cat([inputs.sample_index, scored_tokens(batch.scoring, self.device)])
        at_once = max(self.max_rows, len(inputs.sample_index), 1)
        for start in range(0, max(1, len(wanted)), at_once):
            inputs.sample_index = wanted[start : start + at_once]
            yield self._forward(inputs)

    def _forward(self, inputs: StepInputs) -> Tensor:
        try:
            return self._model.forward(inputs, self.kv.blocks)
        except Exception as error:
            if self._group is not None:
                self._group.out_of_step(error)
            raise

    def _blocks_that_fit(self, share: DeviceShare) -> int:
        """Return the KV blocks for which this worker's share of the device has memory."""
        if self.device.type != "cuda":
            raise ConfigError("kv.memory_bytes: only a GPU's memory is divided by itself; give it a number")
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        element = DTYPE_BYTES[self.dtype]
        reserved = (
            step_bytes(self._step_geometry, element, self.max_rows, self.max_step_tokens) + share.graphs + share.draft
        )
        if self.ranks is not None:
            reserved += exchange_bytes(self.geometry, element, self.max_rows, self.max_step_tokens)
        reserved += STAGING_BYTES + self._lora_bytes
        budget = kv_bytes(
            total=total,
            free=free,
            own=torch.cuda.memory_reserved(self.device),
            sharers=share.sharers,
            fraction=share.fraction,
            reserved=reserved,
        )
        wanted = min(budget, share.most_kv) if share.most_kv else budget
        log.info(
            "GPU memory",
            total_mebibytes=total >> 20,
            free_mebibytes=free >> 20,
            sharers=share.sharers,
            reserved_mebibytes=reserved >> 20,
            kv_mebibytes=wanted >> 20,
            configured_mebibytes=share.most_kv >> 20,
        )
        block_bytes = self._block_geometry(self._rank_geometry).block_bytes + share.draft_block
        blocks = wanted // block_bytes - 1  # one is the spare block
        if blocks < 2:
            raise ConfigError(
                f"kv.memory_bytes: {wanted} bytes are left for the KV cache on {self.device} (free {free}, reserved "
                f"{reserved} for steps and graphs, shared by {share.sharers}); lower engine.max_step_tokens or "
                "engine.cuda_graph_memory_bytes, or run fewer workers on this GPU"
            )
        return blocks

    def _lora_store(self, options: LoraOptions) -> tuple[LoraStore, int]:
        """Return the adapters, checked and not yet loaded, and the maximum bytes of those held at once."""
        if options.adapters and self.geometry.family == "moe" and self.device.type != "cpu":
            raise ModelError(f"model.lora: no adapters for {self.geometry.model_type} models on {self.device.type}")
        checked = check_lora(options.adapters, self.geometry)
        store = LoraStore(checked, self.geometry, self.compute_dtype, self.device, fixed=self.batch_invariant)
        return store, store.most_bytes(options.held)

    def _prepare_thread(self) -> None:
        """Set the number of OpenMP threads and the current GPU where a step will run: torch stores them per thread."""
        if self._prepared_thread != threading.get_ident():
            if self._threads:
                torch.set_num_threads(self._threads)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            self._prepared_thread = threading.get_ident()
