"""One rank's side of a tensor-parallel group: what the ranks exchange while they compute a step.

    embedding     every rank looks up the tokens it has ──all-gather──▶ each takes every token's row from its owner
    o, down       every rank's product, one term ──all-gather, summed in the order of ranks──▶ added to the residual
    experts       likewise; a rank's term, of the experts' parts that it holds, is of the model's dtype
    lm_head       every rank's tokens' logits ──gather──▶ rank 0, which samples
    tokens        rank 0's ──broadcast──▶ all, where a step begins behind the one that samples them

The order of a sum is the order of the ranks, for every row and every batch: a row computes the same bits in any batch,
and all ranks hold the same residual to the last bit. An all-reduce would not do: gloo's cuts the buffer into as many
parts as there are ranks and begins the sum of each part at another rank, so that a row's order would follow its place
in the batch. On a processor the terms are float32, rounded once when they have been summed. On a GPU the sums are
NCCL's all-reduce in the model's dtype: there the matrix products depend on the batch already. NCCL's are kernels, so a
recorded step has them in it; gloo's are the processor's work, and no step with them is recorded.

Used by the lean model on every rank, in lock-step: every rank calls the same with as many rows.
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
"""Time that one rank waits for another within a step; then that one counts as lost."""

Store = Any
"""Store of torch, whose bindings are untyped."""
_FileStore: Any = dist.FileStore  # type: ignore[attr-defined]  # torch's stubs leave it out
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Place in a group, before there is a model. `store`: a file that no group has used, the same for all ranks, or the
    store by which ranks of several hosts meet. `interface`: of the network that they exchange over; "" = loopback.
    `meet` returns when every rank is about to connect. `failed` gets the reason why this rank is out of step."""

    rank: int
    degree: int
    store: str | Store
    meet: Callable[[], None]
    failed: Callable[[str], None] = lambda reason: None  # the error itself ends this rank
    interface: str = ""


class Ranks:
    def __init__(self, group: RankGroup, geometry: ModelGeometry, device: torch.device) -> None:
        self.share = RankShare(geometry, group.rank, group.degree)
        self.failed = group.failed
        self.reduced_bytes = 0
        """Bytes summed over the ranks so far; of a recorded step when it was recorded."""
        self._group, self._device = group, device
        self._on_gpu = device.type == "cuda"
        self._own = torch.empty(0, dtype=torch.uint8, device=device)
        self._all = torch.empty(0, dtype=torch.uint8, device=device)
        self._logits = torch.empty(0, device=device)
        self._kept = False

    def connect(self) -> None:
        """Connect, once, when this rank has loaded its weights."""
        self._group.meet()
        share, interface, store = self.share, self._group.interface, self._group.store
        # Of one machine: nothing else may reach it. NCCL chooses by itself between devices of one machine.
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
            log.info("steps of ranks on a processor are not recorded: gloo exchanges there", degree=share.degree)

    def close(self) -> None:
        """Leave the group, in a process that goes on. NCCL waits for the end of any step that was recorded with it."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def least(self, value: int) -> int:
        found = torch.tensor([value], device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def reserve(self, tokens: int, rows: int, dtype: torch.dtype) -> None:
        """Allocate for the exchanges of any step of `tokens` tokens in `dtype`, `rows` of them sampled."""
        hidden, sampled = self.share.geometry.hidden_size, (rows, self.share.vocabulary_part, torch.float32)
        terms = (tokens, hidden, dtype if self._on_gpu else torch.float32)
        self._term(*terms)
        self._term(*sampled)
        if not self._on_gpu:
            self._space(*terms)
        if self.share.rank == 0:
            self._space(*sampled)
            self._whole(rows)

    def keep_buffers(self) -> None:
        """Fix the buffers, whose addresses recorded steps hold: an exchange that needs larger ones is then an error."""
        self._kept = True

    def hand_out(self, tokens: Tensor) -> None:
        """Broadcast rank 0's tokens, int64 [n], in place."""
        dist.broadcast(tokens, src=0)

    def embed(self, embedding: Embedding, ids: Tensor, out: Tensor) -> None:
        """Set out [T, hidden] to the rows of tokens `ids` [T] of the whole table; `embedding` has this rank's rows."""
        first, end = self.share.vocabulary
        here = (ids >= first) & (ids < end)
        own = (ids - first).mul_(here)
        if self._on_gpu:  # every rank but one adds zeros
            embedding.into(own, out)
            dist.all_reduce(out.masked_fill_(~here[:, None], 0))
            return
        part = self._term(len(ids), out.shape[1], out.dtype)
        embedding.into(own, part)
        everywhere = self._gathered(part).view(-1, out.shape[1])
        owner = torch.div(ids, self.share.vocabulary_part, rounding_mode="floor")
        places = owner * len(ids) + torch.arange(len(ids), device=ids.device)
        torch.index_select(everywhere, 0, places, out=out)

    def add_into(self, product: Linear, x: Tensor, residual: Tensor) -> None:
        """Add to residual [T, hidden] the sum over the ranks of `product` of `x`, rounded before it is added."""
        part = self._term(len(x), product.out_features, x.dtype if self._on_gpu else torch.float32)
        product.into(x, part)
        self._add_sum(part, residual)

    def add_term(self, add_into: Callable[[Tensor], None], residual: Tensor) -> None:
        """Add to residual [T, hidden] the sum over the ranks of what `add_into` adds to zeros of residual's type."""
        part = self._term(len(residual), residual.shape[1], residual.dtype).zero_()
        add_into(part)
        self._add_sum(part, residual)

    def _add_sum(self, part: Tensor, residual: Tensor) -> None:
        self.reduced_bytes += part.numel() * part.itemsize
        if self._on_gpu:
            dist.all_reduce(part)
            residual.add_(part)
            return
        terms = self._gathered(part)
        total = terms[0].float()
        for term in terms[1:]:
            total.add_(term)
        residual.add_(total.to(residual.dtype))

    def whole_logits(self, part: Tensor) -> Tensor:
        """Return float32 [S, vocabulary] of all ranks' `part` on rank 0, until the next call; `part` on the others."""
        rows, width, whole = len(part), self.share.vocabulary_part, self.share.geometry.vocab_size
        if not rows:
            return part if self.share.rank else part.new_empty((0, whole))
        sent = self._term(rows, width, part.dtype)
        sent[:, : part.shape[1]] = part
        if self.share.rank:
            dist.gather(sent, None, dst=0)
            return part
        parts = list(self._space(rows, width, part.dtype))
        dist.gather(sent, parts, dst=0)
        logits = self._whole(rows)
        for rank, of_rank in enumerate(parts):
            first, end = rank * width, min(whole, (rank + 1) * width)
            logits[:, first:end] = of_rank[:, : end - first]
        return logits

    def _gathered(self, part: Tensor) -> Tensor:
        """Return [degree, *part]: every rank's, the same on all of them. They move as bytes."""
        rows, width = part.shape
        everywhere = self._space(rows, width, part.dtype)
        _gather_into(everywhere.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8))
        return everywhere

    def _term(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        size = rows * width * dtype.itemsize
        if len(self._own) < size:
            self._own = self._grown(self._own, size)
        return self._own[:size].view(dtype).view(rows, width)

    def _space(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        size = self.share.degree * rows * width * dtype.itemsize
        if len(self._all) < size:
            self._all = self._grown(self._all, size)
        return self._all[:size].view(dtype).view(self.share.degree, rows, width)

    def _whole(self, rows: int) -> Tensor:
        """Return float32 [rows, vocabulary], on rank 0."""
        size = rows * self.share.geometry.vocab_size
        if len(self._logits) < size:
            self._logits = self._grown(self._logits, size)
        return self._logits[:size].view(rows, -1)

    def _grown(self, buffer: Tensor, size: int) -> Tensor:
        if self._kept:
            raise InvariantViolated(
                f"an exchange of {size} elements needs a larger buffer than recorded steps hold: {len(buffer)}"
            )
        return buffer.new_empty(size)
