"""What a code of E4M3 stands for in Triton, whichever way the device takes: for all 256."""

import pytest
import torch
import triton  # reads annotations: they are not to be postponed here
import triton.language as tl

from cohort.kernels.gpu.attention.attention_tiles import converted_number, moved_number, number_of


@triton.jit
def _numbers(codes, out, HOW: tl.constexpr):
    at = tl.arange(0, 256)
    code = tl.load(codes + at)
    if HOW == 0:
        number = number_of(code, out.dtype.element_ty)
    elif HOW == 1:
        number = converted_number(code, out.dtype.element_ty)
    else:
        number = moved_number(code, out.dtype.element_ty)
    tl.store(out + at, number)


@pytest.mark.parametrize("how", [0, 1, 2], ids=["as the device does", "converted", "moved"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_is_its_number(how, kind, device):
    """Bit for bit, zeros' signs included. Both codes of NaN are NaN, or without the instruction 480."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    found = torch.empty(256, dtype=kind, device=device)
    _numbers[(1,)](codes, found, HOW=how)
    wanted = codes.view(torch.float8_e4m3fn).to(kind)
    if how == 2 or (how == 0 and device.type != "cuda"):
        wanted = torch.where(wanted.isnan(), torch.where(codes < 128, 480.0, -480.0), wanted).to(kind)
    bits = {4: torch.int32, 2: torch.int16}[kind.itemsize]
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(7.0).view(bits), wanted.nan_to_num(7.0).view(bits))
