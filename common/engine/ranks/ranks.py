"""One rank's communicator in a tensor-parallel group: what the ranks exchange while they compute a step.

    embedding     every rank looks up ids in its shard ──all-gather or all-reduce──▶ every rank has every token's row
    o, down       every rank's partial product ──all-reduce──▶ added to the residual; experts likewise
    lm_head       every rank's shard of the logits ──gather──▶ rank 0, which samples
    tokens        rank 0's sampled tokens ──broadcast──▶ all ranks, if the next step is launched ahead of the host

On a GPU the sums and the lookup are NCCL's all-reduce in the model's dtype; its collectives are kernels, so a recorded
step (a CUDA graph) contains them. On a CPU (gloo) the lookup is an all-gather, and so is a sum, whose parts every rank
adds in the order of ranks: results are batch-invariant, and all ranks hold the same residual to the last bit. Gloo's
own ring all-reduce adds each chunk of the buffer in another order of ranks, so a row's bits would depend on its place
in the batch; on a GPU the matrix products' bits depend on the batch already. Partial products on a CPU are float32,
rounded once after the sum; the experts' are in the model's dtype. Gloo runs on the host: no step is recorded.

Used by the engine's own models (`lean_llama.py` …) on every rank: the same calls in the same order, on as many rows.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from cohort.common.engine.config.model_config import ModelGeometry
from cohort.common.engine.config.rank_shares import RankShare
from cohort.common.engine.weights.linear import Embedding, Linear
from cohort.common.errors import InvariantViolated

log = structlog.get_logger(__name__)

EXCHANGE_TIMEOUT_S = 30.0
"""Time that one rank waits for another within a step; after that the other one counts as lost."""

Store = Any
"""Store of torch, whose bindings are untyped."""
_FileStore: Any = dist.FileStore  # type: ignore[attr-defined]  # torch's stubs leave it out
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class RankSettings:
    """A rank's place among `degree` ranks (the tensor-parallel size), and how it connects. `store`: path of a fresh
    file that all ranks share, or the rendezvous store of ranks on several hosts. `interface`: network interface of the
    collectives; "" = loopback. `barrier` blocks until every rank is about to connect. `on_failure` gets the reason when
    a step failed. Rank 0's must end the group; the other ranks need none, as their process ends by itself."""

    rank: int
    degree: int
    store: str | Store
    barrier: Callable[[], None]
    on_failure: Callable[[str], None] = lambda reason: None
    interface: str = ""


class RankComm:
    def __init__(self, settings: RankSettings, geometry: ModelGeometry, device: torch.device) -> None:
        self.share = RankShare(geometry, settings.rank, settings.degree)
        """Shard of the model that this rank holds."""
        self.on_failure = settings.on_failure
        self.allreduce_bytes = 0
        """Bytes of partial sums that this rank put into `allreduce_…` methods. Replays of recorded steps add none."""
        self._settings, self._device = settings, device
        self._on_gpu = device.type == "cuda"
        self._send_buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._gather_buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._logits_buffer = torch.empty(0, device=device)
        self._frozen = False

    def connect(self) -> None:
        """Connect, once, when this rank has loaded its weights."""
        self._settings.barrier()
        share, interface, store = self.share, self._settings.interface, self._settings.store
        # Ranks of one machine: no other host may reach gloo's sockets. NCCL needs no interface between its devices.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface or "lo")
        if interface:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        dist.init_process_group(
            "nccl" if self._on_gpu else "gloo",
            store=_FileStore(store, share.degree) if isinstance(store, str) else store,
            rank=share.rank,
            world_size=share.degree,
            timeout=datetime.timedelta(seconds=EXCHANGE_TIMEOUT_S),
        )
        if not self._on_gpu:
            log.info("tensor parallelism on CPUs uses gloo: steps are not recorded", degree=share.degree)

    def close(self) -> None:
        """Leave the group, in a process that lives on. Callers drop recorded steps first: NCCL waits for their end."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def all_min(self, value: int) -> int:
        """Return the minimum of all ranks' values. A collective call."""
        minimum = torch.tensor([value], device=self._device)
        dist.all_reduce(minimum, dist.ReduceOp.MIN)
        return int(minimum)

    def reserve(self, max_tokens: int, max_sampled: int, dtype: torch.dtype) -> None:
        """Allocate the buffers of any step of `max_tokens` tokens in `dtype`, `max_sampled` of them sampled."""
        of_partial = (max_tokens, self.share.geometry.hidden_size, dtype if self._on_gpu else torch.float32)
        of_logits = (max_sampled, self.share.vocabulary_part, torch.float32)
        self._send_view(*of_partial)
        self._send_view(*of_logits)
        if not self._on_gpu:
            self._gather_view(*of_partial)
        if self.share.rank == 0:
            self._gather_view(*of_logits)
            self._logits_view(max_sampled)

    def freeze_buffers(self) -> None:
        """Keep the buffers, whose addresses recorded steps hold: a call that needs larger ones raises from now on."""
        self._frozen = True

    def broadcast_tokens(self, tokens: Tensor) -> None:
        """Broadcast rank 0's tokens, int64 [n], in place."""
        dist.broadcast(tokens, src=0)

    def embed(self, embedding: Embedding, ids: Tensor, out: Tensor) -> None:
        """Set out [T, hidden] to the embeddings of `ids` [T]; `embedding` is this rank's shard of the table."""
        first, end = self.share.vocabulary
        is_local = (ids >= first) & (ids < end)
        local_ids = (ids - first).mul_(is_local)  # ids of other shards look up row 0, which is discarded
        if self._on_gpu:  # every rank but one adds zeros
            embedding.into(local_ids, out)
            dist.all_reduce(out.masked_fill_(~is_local[:, None], 0))
            return
        rows = self._send_view(len(ids), out.shape[1], out.dtype)
        embedding.into(local_ids, rows)
        all_rows = self._all_gather(rows).view(-1, out.shape[1])
        owner = torch.div(ids, self.share.vocabulary_part, rounding_mode="floor")  # only the last shard may be smaller
        places = owner * len(ids) + torch.arange(len(ids), device=ids.device)
        torch.index_select(all_rows, 0, places, out=out)

    def allreduce_linear(self, linear: Linear, x: Tensor, residual: Tensor) -> None:
        """Add to residual [T, hidden] the sum over the ranks of their `linear(x)`, in the residual's dtype."""
        partial = self._send_view(len(x), linear.out_features, x.dtype if self._on_gpu else torch.float32)
        linear.into(x, partial)
        self._add_sum(partial, residual)

    def allreduce_partial(self, add_partial: Callable[[Tensor], None], residual: Tensor) -> None:
        """Add to residual [T, hidden] the sum over the ranks of what `add_partial` adds to a buffer of zeros."""
        partial = self._send_view(len(residual), residual.shape[1], residual.dtype).zero_()
        add_partial(partial)
        self._add_sum(partial, residual)

    def _add_sum(self, partial: Tensor, residual: Tensor) -> None:
        self.allreduce_bytes += partial.numel() * partial.itemsize
        if self._on_gpu:
            dist.all_reduce(partial)
            residual.add_(partial)
            return
        partials = self._all_gather(partial)
        total = partials[0].float()
        for each in partials[1:]:
            total.add_(each)
        residual.add_(total.to(residual.dtype))

    def gather_logits(self, local: Tensor) -> Tensor:
        """Return all logits of the S sampled tokens, float32 [S, vocabulary], on rank 0; they are valid until the next
        call. Other ranks get back `local`, their shard of the logits."""
        rows, width, vocabulary = len(local), self.share.vocabulary_part, self.share.geometry.vocab_size
        if not rows:
            return local if self.share.rank else local.new_empty((0, vocabulary))
        sent = self._send_view(rows, width, local.dtype)
        sent[:, : local.shape[1]] = local
        if self.share.rank:
            dist.gather(sent, None, dst=0)
            return local
        shards = list(self._gather_view(rows, width, local.dtype))
        dist.gather(sent, shards, dst=0)
        logits = self._logits_view(rows)
        for rank, shard in enumerate(shards):
            first, end = rank * width, min(vocabulary, (rank + 1) * width)
            logits[:, first:end] = shard[:, : end - first]
        return logits

    def _all_gather(self, part: Tensor) -> Tensor:
        """Return [degree, *part.shape], identical on all ranks. Sent as bytes, whatever the dtype."""
        rows, width = part.shape
        gathered = self._gather_view(rows, width, part.dtype)
        _gather_into(gathered.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8))
        return gathered

    def _send_view(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return a view of the send buffer. This and the next two methods enlarge a buffer that is too small."""
        size = rows * width * dtype.itemsize
        self._send_buffer = self._enlarge(self._send_buffer, size)
        return self._send_buffer[:size].view(dtype).view(rows, width)

    def _gather_view(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        size = self.share.degree * rows * width * dtype.itemsize
        self._gather_buffer = self._enlarge(self._gather_buffer, size)
        return self._gather_buffer[:size].view(dtype).view(self.share.degree, rows, width)

    def _logits_view(self, rows: int) -> Tensor:
        size = rows * self.share.geometry.vocab_size
        self._logits_buffer = self._enlarge(self._logits_buffer, size)
        return self._logits_buffer[:size].view(rows, -1)

    def _enlarge(self, buffer: Tensor, size: int) -> Tensor:
        if len(buffer) >= size:
            return buffer
        if self._frozen:
            raise InvariantViolated(
                f"exchange needs a larger buffer than recorded steps hold: {size} × {buffer.dtype}, not {len(buffer)}"
            )
        return buffer.new_empty(size)
