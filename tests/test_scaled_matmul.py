"""Products of quantised matrices by the device, with a stand-in: no device here has them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from compile_fsdp import MixedPrecisionPolicy, fully_shard
from compile_fsdp.runtime.mxfp8 import DATA_DTYPE, SCALE_DTYPE, dequantize, quantize
from compile_fsdp.runtime.quantized_linear import linear_with_planes
from compile_fsdp.runtime.scaled_matmul import (
    obstacle_to_scaled_matmul,
    scaled_matmul,
    swizzled,
)
from tests.explaining import fake_world
from tests.training import cpu_mesh, drive


def plain_scales(swizzled_scales: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """The inverse of `swizzled`, by cuBLAS's formula for the place of one scale."""
    flat = swizzled_scales.view(torch.uint8)
    tiles_across = -(-blocks // 4)
    places = [
        [
            512 * (row // 128 * tiles_across + block // 4)
            + (row % 32) * 16
            + (row % 128) // 32 * 4
            + block % 4
            for block in range(blocks)
        ]
        for row in range(rows)
    ]
    return flat[torch.tensor(places)]


@pytest.fixture
def device_with_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Sizes (m, n, k) of the products that were asked of the device, which checks what it gets."""
    asked: list[tuple[int, ...]] = []

    def scaled_mm(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        recipe_a: Any,
        scale_b: torch.Tensor,
        recipe_b: Any,
        swizzle_a: Any,
        swizzle_b: Any,
        *,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        assert a.dtype == b.dtype == DATA_DTYPE and scale_a.dtype == scale_b.dtype == SCALE_DTYPE
        assert a.is_contiguous() and b.t().is_contiguous()
        assert recipe_a == recipe_b == F.ScalingType.BlockWise1x32
        assert swizzle_a == swizzle_b == F.SwizzleType.SWIZZLE_32_4_4
        (m, k), n = a.shape, b.shape[1]
        asked.append((m, n, k))
        left = dequantize(a, plain_scales(scale_a, m, k // 32))
        right = dequantize(b.t().contiguous(), plain_scales(scale_b, n, k // 32))
        return (left @ right.t()).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    yield asked


@pytest.mark.parametrize("shape", [(128, 4), (32, 1), (160, 6), (384, 8)])
def test_scales_lie_where_the_device_looks(shape: tuple[int, int]) -> None:
    scales = torch.randint(256, shape, dtype=torch.uint8)
    found = swizzled(scales)
    assert found.numel() == -(-shape[0] // 128) * -(-shape[1] // 4) * 512
    assert torch.equal(plain_scales(found, *shape), scales)


def test_scales_lie_as_those_of_torchao() -> None:
    pytest.importorskip("torchao")
    to_blocked = importlib.import_module("torchao.prototype.mx_formats.utils").to_blocked
    scales = torch.randint(256, (160, 6), dtype=torch.uint8)
    theirs = to_blocked(scales.view(SCALE_DTYPE), use_triton_kernel=False)
    assert torch.equal(swizzled(scales).view(torch.uint8), theirs.view(torch.uint8).flatten())


@pytest.mark.parametrize("count", [1, 31, 64])
def test_any_number_of_rows(count: int, device_with_products: list[tuple[int, ...]]) -> None:
    rows, matrix = torch.randn(count, 64), torch.randn(96, 64)
    planes = quantize(matrix)
    found = scaled_matmul(rows, planes, torch.float32)
    padded = torch.cat([rows, torch.zeros(-count % 32, 64)])
    expected = dequantize(*quantize(padded))[:count] @ dequantize(*planes).t()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)  # another shape of product
    assert device_with_products == [(padded.shape[0], 96, 64)]


def test_a_linear_layer(device_with_products: list[tuple[int, ...]]) -> None:
    """Forward and the gradient of the input are products of quantised matrices; the gradient of the
    weight is one in high precision."""
    x = torch.randn(2, 32, 64, requires_grad=True)
    weight, bias = nn.Parameter(torch.randn(96, 64)), nn.Parameter(torch.randn(96))
    gradient = torch.randn(2, 32, 96)
    planes = quantize(weight.detach()), quantize(weight.detach(), columnwise=True)
    y = linear_with_planes(x, weight, bias, lambda: planes[0], lambda: planes[1], scaled=True)
    y.backward(gradient)
    rows, grads = x.detach().flatten(0, 1), gradient.flatten(0, 1)
    of_y = dequantize(*quantize(rows)) @ dequantize(*planes[0]).t() + bias
    of_x = dequantize(*quantize(grads)) @ dequantize(*planes[1], columnwise=True)
    torch.testing.assert_close(y.flatten(0, 1), of_y)
    torch.testing.assert_close(x.grad.flatten(0, 1), of_x)
    torch.testing.assert_close(weight.grad, grads.t() @ rows)
    torch.testing.assert_close(bias.grad, grads.sum(0))
    assert device_with_products == [(64, 96, 64), (64, 64, 96)]


def test_nothing_is_done_for_a_gradient_that_nobody_wants() -> None:
    weight = nn.Parameter(torch.randn(96, 64))
    planes = [quantize(weight.detach(), columnwise=each) for each in (False, True)]
    y = linear_with_planes(torch.ones(2, 64), weight, None, lambda: planes[0], lambda: 1 / 0)
    y.sum().backward()
    assert torch.equal(weight.grad, torch.full((96, 64), 2.0))
    weight.requires_grad_(False)
    x = torch.ones(2, 64, requires_grad=True)
    y = linear_with_planes(x, weight, None, lambda: planes[0], lambda: planes[1])
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 64 * 96, "one product"


def test_autocast_decides_the_dtype(device_with_products: list[tuple[int, ...]]) -> None:
    weight, bias = nn.Parameter(torch.randn(96, 64)), nn.Parameter(torch.randn(96))
    planes = quantize(weight.detach()), quantize(weight.detach(), columnwise=True)
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear_with_planes(x, weight, bias, lambda: planes[0], lambda: planes[1], scaled=True)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32
    assert len(device_with_products) == 2


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
def test_a_policy_asks_for_them(
    driver: str, device_with_products: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a world of one, where nothing has to be gathered."""
    monkeypatch.setattr("compile_fsdp.quantized.obstacle_to_scaled_matmul", lambda device: None)
    with fake_world(1):
        linear = nn.Linear(64, 96)
        planes = [quantize(linear.weight.detach(), columnwise=each) for each in (False, True)]
        bias = linear.bias.detach()
        policy = MixedPrecisionPolicy(compute_weights="mxfp8", scaled_matmul=True)
        fully_shard(linear, cpu_mesh(), None, policy)
        x = torch.randn(32, 64, requires_grad=True)
        y = drive(linear, driver)(x)
        y.sum().backward()
    of_y = dequantize(*quantize(x.detach())) @ dequantize(*planes[0]).t() + bias
    torch.testing.assert_close(y, of_y)
    torch.testing.assert_close(x.grad, torch.ones(32, 96) @ dequantize(*planes[1], columnwise=True))
    assert device_with_products


@pytest.mark.parametrize(
    ("version", "capability", "obstacle"),
    [
        ("2.12.1", (10, 0), "needs torch 2.13, found 2.12.1"),
        ("2.13.0", (9, 0), "needs compute capability 10.0, found 9.0 (a GPU)"),
        ("2.13.0", (10, 0), None),
        ("2.14.1", (12, 1), None),
    ],
)
def test_devices_and_releases_that_have_them(
    version: str,
    capability: tuple[int, int],
    obstacle: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert obstacle_to_scaled_matmul(torch.device("cuda")) == obstacle


def test_a_device_without_them_is_refused() -> None:
    policy = MixedPrecisionPolicy(compute_weights="mxfp8", scaled_matmul=True)
    model = nn.Linear(32, 32)
    message = r"scaled_matmul=True needs .*, found .*\. Leave it out"
    with fake_world(2), pytest.raises(ValueError, match=message):
        fully_shard(model, cpu_mesh(), None, policy)
    assert type(model) is nn.Linear
    assert obstacle_to_scaled_matmul(torch.device("cpu"))


def test_it_needs_weights_to_multiply_with() -> None:
    with pytest.raises(ValueError, match='scaled_matmul=True needs compute_weights="mxfp8"'):
        MixedPrecisionPolicy(scaled_matmul=True)


def test_other_groups_do_without() -> None:
    policy = MixedPrecisionPolicy(compute_weights="mxfp8", scaled_matmul=True)
    assert policy.of_group(quantized=False) == MixedPrecisionPolicy()
    assert policy.of_group(quantized=True) == policy
