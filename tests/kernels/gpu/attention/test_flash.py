"""Which flash attention is taken, why, and that each kind of interface is called as it means its arguments."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.kernels.gpu.attention import flash

CPU = torch.device("cpu")


def causal(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: tuple[int, int]) -> Tensor:
    """PyTorch's own attention of one row, aligned as flash attention documents it: at the bottom right."""
    queries, length = len(query), len(keys)
    left, right = window
    key = torch.arange(length)[None, :]
    own = torch.arange(queries)[:, None] + length - queries
    seen = key <= own
    if left >= 0:
        seen &= key >= own - left
    if right >= 0:
        seen &= key <= own + right
    parts = (each.transpose(0, 1)[None].float() for each in (query, keys, values))
    found = F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale, enable_gqa=True)
    return found[0].transpose(0, 1).to(query.dtype)


def by_row(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, window: tuple[int, int]
) -> Tensor:
    out = torch.full_like(q, float("nan"))
    for row in range(len(cu_q) - 1):
        (first, end), (begin, stop) = cu_q[row : row + 2].tolist(), cu_k[row : row + 2].tolist()
        out[first:end] = causal(q[first:end], k[begin:stop], v[begin:stop], scale, window)
    return out


def version_2(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """flash-attn 2.8's parameters, in its order."""
    assert causal and not dropout_p and block_table is None and not return_attn_probs
    return by_row(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size)


def version_3(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """FlashAttention-3's parameters, in its order."""
    assert causal and seqused_q is None and seqused_k is None and not attention_chunk
    return by_row(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size)


def version_4(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
):
    """flash-attn-4's parameters, in its order; it knows no -1."""
    assert causal and qv is None and page_table is None and -1 not in window_size
    left, right = (-1 if side is None else side for side in window_size)
    return by_row(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, (left, right)), None


def version_3_beta(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return version_3(*args, **kwargs), torch.empty(0)


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (
        "flash_attn",
        "flash_attn_interface",
        "flash_attn_3",
        "flash_attn_3.flash_attn_interface",
        "flash_attn.cute",
    ):
        monkeypatch.setitem(sys.modules, name, None)
    on(monkeypatch, 9)
    flash.chosen.cache_clear()
    yield
    flash.chosen.cache_clear()


def on(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    """The processor, declared to be such a GPU."""
    monkeypatch.setattr(flash, "_gpu", lambda: (CPU, capability))


def install(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]) -> None:
    module = types.ModuleType(name)
    module.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    if "." in name:
        monkeypatch.setitem(sys.modules, name.partition(".")[0], types.ModuleType(name.partition(".")[0]))
    monkeypatch.setitem(sys.modules, name, module)


CASES = {
    "3": ("flash_attn_interface", version_3, "flash_attn_3"),
    "3 as a package": ("flash_attn_3.flash_attn_interface", version_3, "flash_attn_3"),
    "3 beta": ("flash_attn_interface", version_3_beta, "flash_attn_3"),
    "4": ("flash_attn.cute", version_4, "flash_attn_4"),
    "2": ("flash_attn", version_2, "flash_attn_2"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [0, 1, 7])
def test_each_interface_computes_plain_attention(monkeypatch: pytest.MonkeyPatch, case: str, window: int) -> None:
    """Rows with and without a prefix, query heads that share keys, windows."""
    module, function, name = CASES[case]
    install(monkeypatch, module, function)
    assert flash.prefill_attention_name() == name
    query, keys, values = torch.randn(17, 6, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    query_rows, key_rows = [0, 5, 6, 17], [0, 5, 20, 40]
    found = flash.flash_function()(
        query, keys, values, torch.tensor(query_rows), torch.tensor(key_rows), 11, 20, 0.3, window
    )
    expected = [
        flash._plain(query[q:r], keys[k:m], values[k:m], 0.3, window)
        for q, r, k, m in zip(query_rows, query_rows[1:], key_rows, key_rows[1:], strict=False)
    ]
    assert torch.allclose(found, torch.cat(expected), atol=1e-5)


def choice() -> tuple[str, str, str]:
    """Name and reason, and at which level it was logged; it is logged once."""
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            flash.flash_function()
            name = flash.prefill_attention_name()
    [entry] = logs
    assert entry["implementation"] == name
    return name, entry["reason"], entry["log_level"]


def test_a_folder_of_version_4_is_no_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package has no module `flash_attn`, and can be imported all the same."""
    install(monkeypatch, "flash_attn.cute", raising)
    empty = types.ModuleType("flash_attn")
    empty.__spec__ = ModuleSpec("flash_attn", None, is_package=True)
    monkeypatch.setitem(sys.modules, "flash_attn", empty)
    name, reason, level = choice()
    assert (name, level) == ("torch", "warning")
    assert reason.endswith("flash_attn_2 is not installed")


def test_version_3_comes_before_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn.cute", version_4)
    install(monkeypatch, "flash_attn", version_2)
    install(monkeypatch, "flash_attn_interface", version_3)
    assert choice() == ("flash_attn_3", "agrees with plain attention", "info")


@pytest.mark.parametrize("capability", [8, 10, 12])
def test_version_3_is_hoppers(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    on(monkeypatch, capability)
    install(monkeypatch, "flash_attn", version_2)
    install(monkeypatch, "flash_attn_interface", version_3)
    name, reason, level = choice()
    assert (name, level) == ("flash_attn_2", "info")
    assert "needs a Hopper GPU" in reason and str(capability) in reason


def test_without_either_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "; ".join(f"flash_attn_{version} is not installed" for version in (3, 4, 2))
    assert choice() == ("torch", reason, "info")
    assert flash.flash_function() is flash._torch_flash


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_gpu", lambda: None)
    assert choice() == ("torch", "no GPU", "info")


def misaligned(*args: Any, causal: bool = False, **kwargs: Any) -> Tensor:
    """As flash-attn before 2.1: the mask at the top left."""
    q, k, v = args
    out = torch.empty_like(q)
    cu_q, cu_k = kwargs["cu_seqlens_q"].tolist(), kwargs["cu_seqlens_k"].tolist()
    for first, end, begin in zip(cu_q, cu_q[1:], cu_k, strict=False):
        last = begin + end - first
        window = (-1, -1)
        out[first:end] = globals()["causal"](
            q[first:end], k[begin:last], v[begin:last], kwargs["softmax_scale"], window
        )
    return out


def raising(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("no kernel image is available for execution on the device")


def nans(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.full_like(q, float("nan"))


@pytest.mark.parametrize(
    ("function", "words"),
    [(misaligned, "differs from plain attention"), (raising, "no kernel image"), (nans, "differs from plain")],
)
def test_one_that_does_not_work_here_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], words: str
) -> None:
    install(monkeypatch, "flash_attn_interface", function)
    install(monkeypatch, "flash_attn", version_2)
    name, reason, level = choice()
    assert (name, level) == ("flash_attn_2", "warning")
    assert words in reason


def test_one_built_for_another_torch_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ImportError("undefined symbol: _ZN3c105ErrorC2E")

    monkeypatch.setitem(sys.modules, "flash_attn", Broken("flash_attn"))
    name, reason, level = choice()
    assert (name, level) == ("torch", "warning")
    assert "undefined symbol" in reason
