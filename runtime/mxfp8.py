"""MXFP8: blocks of 32 E4M3 numbers that share one E8M0 scale, a power of two.

A matrix is quantised along its rows or along its columns, whichever a product sums over:

    rowwise      data (rows, cols), scales (rows, cols / 32)     x @ weight.T sums over cols
    columnwise   data (rows, cols), scales (rows / 32, cols)     grad @ weight sums over rows

Both keep the matrix's orientation, so that 32 rows of one and of the other are contiguous. The
functions are plain tensor operations without choices that depend on data: compilers trace them.

The format and the conversion are those of the OCP Microscaling Formats (MX) Specification v1.0
(MXFP8 with E4M3 elements; sections 5 and 6.3). Of the scale rules in use this is the
specification's own: the exponent is rounded down, floor(log2(amax)), and never up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = [
    "BLOCK",
    "DATA_DTYPE",
    "SCALE_DTYPE",
    "SOURCE_DTYPES",
    "check_eligible",
    "dequantize",
    "is_eligible",
    "quantize",
]

BLOCK = 32
"""Numbers that share a scale."""

DATA_DTYPE = torch.float8_e4m3fn
SCALE_DTYPE = torch.float8_e8m0fnu

_MAX = 448.0
# Of E4M3: 448 is 1.75 * 2**8.
_MAX_EXPONENT = 8
# Of E8M0, which has no other special value.
_NAN_SCALE = 255
# Of fp32: the exponent starts at this bit, is biased like E8M0's, and is all ones in a NaN.
_EXPONENT_BIT = 23
_QUIET_NAN = 0x7FC00000
# The bits of 2**-127, fp32's one subnormal power of two that E8M0 has: its byte is 0.
_LEAST_SCALE = 0x00400000

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be quantised."""


def is_eligible(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape can be quantised: 2-D, both dims a multiple of 32."""
    return len(shape) == 2 and all(size % BLOCK == 0 for size in shape)


def check_eligible(what: str, shape: Sequence[int]) -> None:
    """Raise ValueError, naming ``what``, for a shape that is not `is_eligible`."""
    if not is_eligible(shape):
        raise ValueError(
            f"{what} has shape {tuple(shape)}: MXFP8 needs a 2-D tensor with both dims a multiple "
            f"of {BLOCK}; pad it, or keep it in high precision"
        )


def quantize(
    tensor: torch.Tensor, *, columnwise: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to MXFP8.

    A block's scale is 2**(floor(log2(amax)) - 8), amax being its largest magnitude and 8 the
    exponent of E4M3's largest number, 448. An element is divided by the scale, exactly, and
    rounded to the nearest E4M3 number, ties to even. What exceeds 448 (amax / scale is less than
    512) saturates with its sign; what is at most 2**-10 becomes a zero with its sign.

    - A block of zeros has the least scale, 2**-127 (byte 0), and keeps the signs of its zeros.
    - So has every block with an amax below 2**-118, fp32 subnormals included: E8M0 has no less.
    - A block with a NaN has the scale NaN (byte 255), and every element of it is NaN (byte 0x7f).
    - A block with an infinity but no NaN has the scale 2**120, that of fp32's exponent of an
      infinity, and no other block has it. The infinity is stored as 448, and 448 * 2**120 exceeds
      fp32 and bf16: it comes back as the infinity that it was.

    Args:
        tensor: ``(rows, cols)``, both multiples of 32, of fp32, bf16 or fp16.
        columnwise: Blocks are 32 rows of one column, and not 32 columns of one row.

    Returns:
        ``data`` of ``float8_e4m3fn``, of the tensor's shape, and ``scales``, the bytes of E8M0
        numbers as ``uint8``: ``(rows, cols / 32)``, or columnwise ``(rows / 32, cols)``. Inductor
        cannot make ``float8_e8m0fnu``; ``scales.view(torch.float8_e8m0fnu)`` can.

    Raises:
        TypeError: The dtype is another one.
        ValueError: The shape is not as described.
    """
    check_eligible("quantize: the tensor", tensor.shape)
    if tensor.dtype not in SOURCE_DTYPES:
        raise TypeError(
            f"quantize: expected a tensor of one of {list(map(str, SOURCE_DTYPES))}, found "
            f"{tensor.dtype}; convert it first"
        )
    blocks, dim = _in_blocks(tensor.to(torch.float32), columnwise)
    amax = blocks.abs().amax(dim, keepdim=True)
    has_nan = amax.isnan()
    # E8M0's bias is fp32's, so the difference of exponents is one of biased exponents.
    exponent = amax.view(torch.int32) >> _EXPONENT_BIT
    biased = (exponent - _MAX_EXPONENT).clamp(min=0)
    # 2**(127 - biased), a normal number: an infinity's biased exponent is 247.
    factor = ((254 - biased) << _EXPONENT_BIT).view(torch.float32)
    # Casts to E4M3 do not saturate in every release and on every device.
    scaled = (blocks * factor).clamp(-_MAX, _MAX)
    data = scaled.masked_fill(has_nan, float("nan")).to(DATA_DTYPE)
    scales = biased.masked_fill(has_nan, _NAN_SCALE).to(torch.uint8)
    return data.view(tensor.shape), scales.squeeze(dim)


def dequantize(
    data: torch.Tensor,
    scales: torch.Tensor,
    *,
    columnwise: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The values of a matrix that `quantize` made: element times scale.

    Exact in fp32, as long as the device does not flush fp32 subnormals to zero, and in bf16 down
    to 2**-133; another ``dtype`` rounds to nearest even and overflows as its casts do. A product
    beyond fp32 is an infinity. A scale of NaN, like an element that is NaN, gives NaN.

    Args:
        data: ``(rows, cols)`` of ``float8_e4m3fn``, or its bytes as ``uint8``.
        scales: As `quantize` returns them, or as ``float8_e8m0fnu``.
        columnwise: As for `quantize`.
        dtype: Of the result.

    Raises:
        ValueError: The shapes do not belong together.
    """
    check_eligible("dequantize: data", data.shape)
    rows, cols = data.shape
    expected = (rows // BLOCK, cols) if columnwise else (rows, cols // BLOCK)
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"dequantize: data of shape {tuple(data.shape)} has "
            f"{'columnwise' if columnwise else 'rowwise'} scales of shape {expected}, found "
            f"{tuple(scales.shape)}"
        )
    values = data.view(DATA_DTYPE).to(torch.float32)
    blocks, dim = _in_blocks(values, columnwise)
    factors = _powers_of_two(scales.view(torch.uint8)).unsqueeze(dim)
    return (blocks * factors).view(data.shape).to(dtype)


def _in_blocks(tensor: torch.Tensor, columnwise: bool) -> tuple[torch.Tensor, int]:
    """``tensor`` with a dim that runs through a block, and the number of that dim."""
    rows, cols = tensor.shape
    if columnwise:
        return tensor.reshape(rows // BLOCK, BLOCK, cols), 1
    return tensor.reshape(rows, cols // BLOCK, BLOCK), 2


def _powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes as fp32."""
    biased = scales.to(torch.int32)
    bits = (biased << _EXPONENT_BIT).masked_fill(biased == 0, _LEAST_SCALE)
    return bits.masked_fill(biased == _NAN_SCALE, _QUIET_NAN).view(torch.float32)
