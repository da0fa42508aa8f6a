"""From the tensors of a quantised checkpoint, as they lie in its files, to the exchange form `QuantizedWeight`.

Called by `quantized_files` with tensors whose dtypes and shapes it has checked. Pure: tensors in, weights out. The
words of 32 bits are little-endian in the files and in memory, so a word's lowest bits are its first byte.

    scaled  AutoFP8, DeepSeek's and Qwen's FP8, compressed-tensors' float- and int-quantized: codes of 8 bits as they
            are
    packed  compressed-tensors' pack-quantized: inputs along a row, the first in the lowest bits, each plus half the
            range
    awq     [inputs, outputs / 8]: eight outputs a word, in the order 0 2 4 6 1 3 5 7
    gptq    [inputs / n, outputs]: n inputs a word, the first in the lowest bits; zeros by outputs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cohort.common.engine.config.quantization_config import Bits, CodeLayout, WeightScheme
from cohort.common.engine.weights.quantized import QuantizedWeight
from cohort.common.errors import ModelError

_ELEMENTS_AT_ONCE = 1 << 22  # that are float32 beside their place while a weight is dequantised
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the outputs 0 to 7 in a word, in nibbles


@dataclass(frozen=True, slots=True)
class ReorderedWeight:
    """A weight whose groups are not of neighbouring inputs (GPTQ's act-order): `groups` int64 [in] names each input's
    column of `scales` and `offsets`. No product reads it; it is dequantised at load. Codes are uint8 or int8 [out, in].
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    groups: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.codes.shape
        return outputs, inputs

    @property
    def layout(self) -> CodeLayout:
        return CodeLayout(8, False, 1, self.shape[1], self.offsets is not None, reordered=True)

    def dequantized(self) -> Tensor:
        """Return the numbers, float32 [out, in]."""
        values = self.codes.float().mul_(self.scales[:, self.groups])
        return values if self.offsets is None else values.add_(self.offsets[:, self.groups])


StoredWeight = QuantizedWeight | ReorderedWeight


def scaled(codes: Tensor, scales: Tensor, zeros: Tensor | None, scheme: WeightScheme) -> QuantizedWeight:
    """Convert `codes`, float8_e4m3fn or int8 [out, in]; `scales` and `zeros`: one of the tensor, [out] or [out, 1], one
    of every block, or [out, groups]."""
    spread, group = _spread(scales, codes.shape[0], codes.shape[1], scheme)
    offsets = None
    if zeros is not None:
        offsets = _offsets(spread, _spread(zeros, codes.shape[0], codes.shape[1], scheme)[0])
    return QuantizedWeight("int8" if codes.dtype == torch.int8 else "e4m3", codes, spread, offsets, group)


def packed(
    words: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None, inputs: int, scheme: WeightScheme
) -> StoredWeight:
    """Convert `words` int32 [out, …]; `zeros` int32 [out / n, groups], packed along the outputs; None = symmetric."""
    outputs, half = len(words), 1 << (scheme.bits - 1)
    spread, group = _spread(scales, outputs, inputs, scheme)
    of_zeros = torch.full_like(spread, half)
    if zeros is not None:
        of_zeros = _unpacked(zeros.t().contiguous(), scheme.bits)[:, :outputs].t().float().contiguous()
    codes = _bytes(words)[:, : inputs * scheme.bits // 8].contiguous()
    return _integers(codes, spread, of_zeros, group, groups, scheme.bits)


def awq(words: Tensor, scales: Tensor, zeros: Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """Convert `words` int32 [in, out / 8], `zeros` int32 [groups, out / 8], `scales` [groups, out]."""
    inputs, spread = len(words), scales.t().float().contiguous()
    codes = torch.empty((words.shape[1], 8, inputs // 2), dtype=torch.uint8, device=words.device)
    for output, nibble in enumerate(_awq_nibbles(words)):
        codes[:, output] = nibble[:, 0::2] | (nibble[:, 1::2] << 4)
    offsets = _offsets(spread, torch.stack(list(_awq_nibbles(zeros)), dim=1).flatten(0, 1))
    return QuantizedWeight("uint4", codes.flatten(0, 1), spread, offsets, scheme.group or inputs)


def gptq(words: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor | None, scheme: WeightScheme) -> StoredWeight:
    """Convert `words` int32 [in / n, out], `zeros` int32 [groups, out / n], `scales` [groups, out], `groups` [in].

    The first version stores zero - 1 in the zero's own bits, so it wraps there as AutoGPTQ's reference does.
    """
    codes = _bytes(words.t().contiguous())
    inputs = codes.shape[1] * 8 // scheme.bits
    of_zeros = _unpacked(zeros, scheme.bits).t()[: scales.shape[1]]
    if scheme.zero_is_one_less:
        of_zeros = (of_zeros + 1) & ((1 << scheme.bits) - 1)
    spread = scales.t().float().contiguous()
    return _integers(codes, spread, of_zeros.float().contiguous(), scheme.group or inputs, groups, scheme.bits)


def rows_of(weight: StoredWeight, first: int, count: int) -> StoredWeight:
    """Return some outputs of a weight."""
    part = slice(first, first + count)
    offsets = None if weight.offsets is None else weight.offsets[part]
    return replace(weight, codes=weight.codes[part], scales=weight.scales[part], offsets=offsets)


def columns_of(weight: StoredWeight, first: int, end: int) -> StoredWeight:
    """Cut out the inputs [first, end) of a weight. Raises `ModelError` where they begin or end within a group, or a
    byte."""
    _, inputs = weight.shape
    if isinstance(weight, ReorderedWeight):
        return replace(weight, codes=weight.codes[:, first:end], groups=weight.groups[first:end])
    group, per_byte = weight.group, 2 if weight.code == "uint4" else 1
    whole = group >= inputs
    if not whole and (first % group or (end % group and end != inputs)):
        raise ModelError(f"inputs {first} to {end} of {inputs} would cut through a group of {group} that share a scale")
    if first % per_byte or end % per_byte:
        raise ModelError(f"inputs {first} to {end} of {inputs} would cut through a byte of two codes")
    groups = slice(None) if whole else slice(first // group, -(-end // group))
    return QuantizedWeight(
        weight.code,
        weight.codes[:, first // per_byte : end // per_byte].contiguous(),
        weight.scales[:, groups].contiguous(),
        None if weight.offsets is None else weight.offsets[:, groups].contiguous(),
        end - first if whole else group,
    )


def together(parts: Sequence[StoredWeight]) -> StoredWeight:
    """Join outputs of one weight, one part after the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        offsets=torch.cat(offsets) if offsets else None,
    )


def widened(weight: StoredWeight) -> Tensor:
    """Return the same bits as `dequantized`, several times as fast where groups fill the rows."""
    outputs, inputs = weight.shape
    if isinstance(weight, ReorderedWeight) or inputs % weight.group:
        return weight.dequantized()
    codes = weight.codes
    if weight.code == "uint4":
        values = torch.empty((outputs, inputs), device=codes.device)
        values[:, 0::2] = codes & 15
        values[:, 1::2] = codes >> 4
    elif weight.code == "e4m3" and codes.device.type == "cpu":  # torch converts one after the other there
        numbers = torch.arange(256, dtype=torch.uint8).view(codes.dtype).float()
        values = torch.index_select(numbers, 0, codes.contiguous().view(torch.uint8).view(-1).int())
        values = values.view(outputs, inputs)
    else:
        values = codes.float()
    grouped = values.view(outputs, -1, weight.group)
    grouped.mul_(weight.scales[:, :, None])
    if weight.offsets is not None:
        grouped.add_(weight.offsets[:, :, None])
    return values


def dequantize_into(weight: StoredWeight, place: Tensor) -> None:
    """place [out, in] = the weight, a few rows at a time."""
    outputs, inputs = weight.shape
    step = max(1, _ELEMENTS_AT_ONCE // inputs)
    for first in range(0, outputs, step):
        place[first : first + step].copy_(widened(rows_of(weight, first, min(step, outputs - first))))


def _integers(
    codes: Tensor, scales: Tensor, zeros: Tensor, group: int, groups: Tensor | None, bits: Bits
) -> StoredWeight:
    """Convert `codes` uint8 [out, bytes] of unsigned integers, `zeros` float32 as unsigned; `groups` where inputs name
    their own. Eight bits become signed, as the exchange form has them."""
    if bits == 8:
        codes, zeros = (codes ^ 0x80).view(torch.int8), zeros - 128.0
    offsets = _offsets(scales, zeros)
    inputs = codes.shape[1] * 8 // bits
    in_order = torch.arange(inputs, device=codes.device) // group
    if groups is not None and not torch.equal(groups.long(), in_order):
        if int(groups.min()) < 0 or int(groups.max()) >= scales.shape[1]:
            raise ModelError(f"inputs of groups {int(groups.min())} to {int(groups.max())}, of {scales.shape[1]} there")
        wide = _unpacked_bytes(codes) if bits == 4 else codes
        return ReorderedWeight(wide, scales, offsets, groups.long())
    return QuantizedWeight("int8" if bits == 8 else "uint4", codes, scales, offsets, group)


def _offsets(scales: Tensor, zeros: Tensor) -> Tensor | None:
    """Return -scale · zero; None where every zero is 0."""
    return None if not bool(zeros.any()) else -(scales * zeros.float())


def _spread(scales: Tensor, outputs: int, inputs: int, scheme: WeightScheme) -> tuple[Tensor, int]:
    """Return scales float32 [out, groups] and the number of inputs of a group."""
    values = scales.float()
    if scheme.block is not None:
        rows, group = scheme.block
        blocks = (-(-outputs // rows), -(-inputs // group))
        if tuple(values.shape) == blocks:
            return values.repeat_interleave(rows, dim=0)[:outputs].contiguous(), group
    elif values.numel() == 1:
        return values.reshape(1, 1).expand(outputs, 1).contiguous(), inputs
    elif tuple(values.shape) in ((outputs,), (outputs, 1)):
        return values.reshape(outputs, 1).contiguous(), inputs
    elif scheme.group and tuple(values.shape) == (outputs, -(-inputs // scheme.group)):
        return values.contiguous(), scheme.group
    unit = f"blocks of {scheme.block}" if scheme.block else f"groups of {scheme.group}" if scheme.group else "channels"
    raise ModelError(f"scales of shape {tuple(scales.shape)} for a weight of {(outputs, inputs)} in {unit}")


def _bytes(words: Tensor) -> Tensor:
    """Return uint8 [rows, 4 · words]. A single column counts as contiguous whatever its stride, which no view takes."""
    return words.contiguous().view(-1).view(torch.uint8).view(len(words), -1)


def _unpacked(words: Tensor, bits: Bits) -> Tensor:
    """Return uint8 [rows, values] of int32 words [rows, …], lowest bits first."""
    return _bytes(words) if bits == 8 else _unpacked_bytes(_bytes(words))


def _unpacked_bytes(pairs: Tensor) -> Tensor:
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).view(len(pairs), -1)


def _awq_nibbles(words: Tensor) -> Iterator[Tensor]:
    """Yield uint8 [outputs / 8, rows] of the first output of every word [rows, outputs / 8], of the second, …"""
    pairs = _bytes(words.t()).view(words.shape[1], len(words), 4)
    for place in _AWQ_PLACES:
        pair = pairs[:, :, place // 2]
        yield pair >> 4 if place % 2 else pair & 15
