"""MXFP8: every byte as two other implementations make it, and in compiled graphs as in eager."""

from __future__ import annotations

import importlib
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_fsdp.runtime.mxfp8 import check_eligible, dequantize, is_eligible, quantize

COLUMNWISE = pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def reference(tensor: torch.Tensor, columnwise: bool) -> tuple[np.ndarray, np.ndarray]:
    """The specification's conversion in fp64, rounded to E4M3 by ml_dtypes: data and scales."""
    values = tensor.double().numpy()
    values = values.T if columnwise else values
    blocks = values.reshape(*values.shape[:-1], values.shape[-1] // 32, 32)
    amax = np.abs(blocks).max(-1)
    with np.errstate(all="ignore"):
        # frexp is exact: amax is fraction * 2**power with a fraction in [0.5, 1).
        power = np.where(amax > 0, np.frexp(amax)[1], -1000)
        exponent = np.clip(np.where(np.isinf(amax), 129, power) - 1 - 8, -127, 127)
        scaled = np.clip(blocks / np.ldexp(1.0, exponent)[..., None], -448, 448)
        data = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    scales = (exponent + 127).astype(np.uint8)
    data[np.isnan(amax)], scales[np.isnan(amax)] = 0x7F, 0xFF
    data = data.reshape(values.shape)
    return (data.T, scales.T) if columnwise else (data, scales)


def reference_values(data: np.ndarray, scales: np.ndarray, columnwise: bool) -> np.ndarray:
    """What the bytes stand for, by ml_dtypes, rounded to fp32 once."""
    elements = np.ascontiguousarray(data).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factors = np.ascontiguousarray(scales).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    with np.errstate(all="ignore"):
        return (elements * factors.repeat(32, 0 if columnwise else 1)).astype(np.float32)


def random_bits(rows: int, cols: int) -> torch.Tensor:
    """fp32 values of every kind: each 256th is an infinity or a NaN, and each 256th subnormal."""
    bits = torch.randint(-(2**31), 2**31, (rows, cols), dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def every_scale() -> torch.Tensor:
    """Squares of 32 x 32 of every magnitude from the least fp32 subnormal to the largest number."""
    magnitudes = torch.exp2(torch.arange(18 * 16).double() % 277 - 149).view(18, 16)
    squares = magnitudes.repeat_interleave(32, 0).repeat_interleave(32, 1)
    return (squares * (1 + torch.rand_like(squares))).float()


def ties() -> torch.Tensor:
    """What lies halfway between two E4M3 numbers, its neighbours in fp32, and more than 448."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = torch.cat([(numbers[1:] + numbers[:-1]) / 2, torch.tensor([464.0, 480.0, 496.0])])
    near = [torch.nextafter(halves, torch.tensor(end)) for end in (0.0, math.inf)]
    values = torch.cat([halves, *near])
    # Each by itself in a block with 256, of scale 1; along both dims.
    values = torch.cat([values, -values])[: 24 * 32].view(24, 32, 1)
    blocks = torch.cat([torch.full((24, 32, 1), 256.0), values, torch.zeros(24, 32, 30)], 2)
    return torch.cat([blocks, blocks.transpose(1, 2)]).view(48 * 32, 32)


def special() -> torch.Tensor:
    """Zeros of both signs, infinities and NaNs, alone and with others, and fp32's extremes."""
    blocks = torch.zeros(32, 32)
    blocks[1] = -0.0
    blocks[2, 3], blocks[2, 4] = math.inf, 1.0
    blocks[3, 3], blocks[3, 4] = -math.inf, torch.finfo(torch.float32).max
    blocks[4, 3], blocks[4, 4] = math.nan, 1.0
    blocks[5, 3], blocks[5, 4] = math.inf, math.nan
    blocks[6] = torch.finfo(torch.float32).max
    blocks[7, 0], blocks[7, 1] = 2.0**-149, -(2.0**-149)
    blocks[8, 0], blocks[8, 1] = 2.0**-118, 2.0**-137
    blocks[9, 0], blocks[9, 1] = 2.0**-119, 2.0**-136
    blocks[10, 0] = math.nextafter(2.0, 0.0)
    blocks[11] = -math.nan
    blocks[12, 0], blocks[12, 1] = 1.0, torch.tensor(0x7FA00000).int().view(torch.float32)
    return blocks


INPUTS = {
    "normal": lambda: torch.randn(96, 160),
    "bits": lambda: random_bits(256, 256),
    "scales": every_scale,
    "ties": ties,
    "special": special,
    "special columns": lambda: special().T.contiguous(),
    "strided": lambda: torch.randn(64, 96).T,
}


def equal_bytes(found: torch.Tensor, expected: np.ndarray) -> bool:
    return np.array_equal(found.view(torch.uint8).numpy(), expected)


@COLUMNWISE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_bytes_are_those_of_the_specification(
    name: str, dtype: torch.dtype, columnwise: bool
) -> None:
    tensor = INPUTS[name]().to(dtype)
    data, scales = quantize(tensor, columnwise=columnwise)
    expected_data, expected_scales = reference(tensor, columnwise)
    assert equal_bytes(scales, expected_scales)
    assert equal_bytes(data, expected_data)
    expected = reference_values(expected_data, expected_scales, columnwise)
    for bytes_ in (scales, scales.view(torch.float8_e8m0fnu)):
        found = dequantize(data, bytes_, columnwise=columnwise)
        assert np.array_equal(found.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", [name for name in INPUTS if name != "strided"])
def test_bytes_are_those_of_torchao(name: str, dtype: torch.dtype) -> None:
    """Its FLOOR mode, the specification's rule; the others round the exponent up.

    Two differences are intended. torchao's elements of a block with a NaN are those that division
    by an infinity gives; all are NaN here, as the scale says. And torchao divides by 2**-126, the
    least normal number, where it stores 2**-127: such blocks come back as half of what they were.
    """
    pytest.importorskip("torchao")
    mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    tensor = INPUTS[name]().to(dtype)
    data, scales = quantize(tensor)
    their_scales, their_data = mx.to_mx(tensor, torch.float8_e4m3fn, 32)
    their_scales = their_scales.view(torch.uint8)
    assert torch.equal(scales, their_scales)
    same = (0 < scales) & (scales < 255)
    blocks, theirs = (each.view(torch.uint8).view(*scales.shape, 32) for each in (data, their_data))
    assert torch.equal(blocks[same], theirs[same])


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Up to 3 x 3 blocks of arbitrary fp32 values, mostly of magnitudes that are close together."""
    rows, cols = (32 * draw(st.integers(0, 3)) for _ in range(2))
    middle = draw(st.integers(-149, 127))
    exponents = st.integers(max(-149, middle - 20), min(127, middle + 12))
    seed = draw(st.integers(0, 2**32 - 1))
    low, high = sorted((draw(exponents), draw(exponents)))
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(low, high + 1, (rows, cols), generator=generator).double()
    values = torch.randn(rows, cols, generator=generator).double() * torch.exp2(powers)
    for value in draw(st.lists(st.floats(width=32), max_size=3)):
        if values.numel():
            place = draw(st.integers(0, values.numel() - 1))
            values.view(-1)[place] = value
    return values.float()


@settings(max_examples=150, deadline=None)
@given(matrices(), st.booleans())
def test_any_matrix(tensor: torch.Tensor, columnwise: bool) -> None:
    data, scales = quantize(tensor, columnwise=columnwise)
    rows, cols = tensor.shape
    assert data.shape == (rows, cols)
    assert scales.shape == ((rows // 32, cols) if columnwise else (rows, cols // 32))
    if tensor.numel():
        expected_data, expected_scales = reference(tensor, columnwise)
        assert equal_bytes(scales, expected_scales)
        assert equal_bytes(data, expected_data)
    values = dequantize(data, scales, columnwise=columnwise)
    again, again_scales = quantize(values, columnwise=columnwise)
    assert torch.equal(
        dequantize(again, again_scales, columnwise=columnwise).nan_to_num(0.5),
        values.nan_to_num(0.5),
    ), "quantised values are their own quantisation"


@COLUMNWISE
def test_infinities_and_nans_come_back(columnwise: bool) -> None:
    tensor = torch.ones(32, 64)
    tensor[0, 0], tensor[1, 33] = -math.inf, math.nan
    values = dequantize(*quantize(tensor, columnwise=columnwise), columnwise=columnwise)
    assert values[0, 0] == -math.inf
    assert values[1, 33].isnan()
    block = values[:, 33] if columnwise else values[1, 32:]
    assert block.isnan().all()
    assert values.isnan().sum() == 32, "NaN stays within its block"
    assert values.isinf().sum() == 1


def test_a_scale_of_nan_makes_numbers_nan() -> None:
    """Whoever made them: the elements of such a block may be numbers."""
    data, scales = quantize(torch.ones(32, 64))
    scales[3, 1] = 255
    values = dequantize(data, scales)
    assert values[3, 32:].isnan().all()
    assert values.isnan().sum() == 32


def test_dequantise_rounds_to_other_dtypes() -> None:
    tensor = torch.randn(64, 64)
    data, scales = quantize(tensor)
    exact = dequantize(data, scales)
    assert exact.dtype is torch.float32
    half = dequantize(data, scales, dtype=torch.bfloat16)
    assert half.dtype is torch.bfloat16
    assert torch.equal(half.float(), exact), "E4M3 has fewer digits than bf16"
    # Within half of E4M3's last digit, 2**-4 of the value; where 448 cuts off, 64 of 512.
    assert ((exact - tensor).abs() <= tensor.abs() / 8 + 2.0**-9 * tensor.abs().max()).all()


@COLUMNWISE
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_in_one_graph_and_bitwise_as_in_eager(backend: str, columnwise: bool) -> None:
    def there_and_back(
        tensor: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        data, scales = quantize(tensor, columnwise=columnwise)
        return data, scales, dequantize(data, scales, columnwise=columnwise)

    compiled = torch.compile(there_and_back, backend=backend, fullgraph=True)
    tensor = torch.cat(
        [random_bits(128, 256), every_scale()[:64, :256], every_scale()[-64:, -256:]]
    )
    for expected, found in zip(there_and_back(tensor), compiled(tensor), strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)) or (
            # The sign of a NaN that a product makes is the processor's choice.
            torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5))
        )


def test_bad_input() -> None:
    for shape in [(32,), (32, 33), (16, 32), (32, 32, 32), ()]:
        assert not is_eligible(shape)
        with pytest.raises(ValueError, match=r"w has shape .*both dims a multiple of 32; pad it"):
            check_eligible("w", shape)
        with pytest.raises(ValueError, match=r"quantize: the tensor has shape"):
            quantize(torch.zeros(shape))
    assert is_eligible((32, 64))
    for dtype in (torch.float64, torch.int32, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=rf"found {dtype}; convert it first"):
            quantize(torch.zeros(32, 32, dtype=dtype))
    data, scales = quantize(torch.zeros(64, 32))
    with pytest.raises(ValueError, match=r"columnwise scales of shape \(2, 32\), found \(64, 1\)"):
        dequantize(data, scales, columnwise=True)
    with pytest.raises(ValueError, match="dequantize: data has shape"):
        dequantize(data[:, :31], scales)
