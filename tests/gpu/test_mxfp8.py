"""MXFP8 compute weights on a GPU: the same bytes as on the CPU, and products by the device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compile_fsdp import MixedPrecisionPolicy, fully_shard
from compile_fsdp.runtime.mxfp8 import dequantize, quantize
from compile_fsdp.runtime.scaled_matmul import obstacle_to_scaled_matmul, scaled_matmul
from tests.gpu.support import BF16_ROUNDING, DEVICE, drive, mesh_of
from tests.quantized import Model, batches, reference_of, shard_on
from tests.training import full

pytestmark = pytest.mark.usefixtures("alone")

# A rank alone sends nothing; it quantises and dequantises all the same.
DRIVERS = ["eager", "aot_eager", "inductor"]


@pytest.mark.parametrize("columnwise", [False, True])
def test_the_bytes_are_those_of_the_cpu(columnwise: bool) -> None:
    values = torch.randn(64, 96) * torch.logspace(-40, 38, 96)
    values[3, 5], values[40, 7] = float("nan"), float("inf")
    for mine, theirs in zip(
        quantize(values.to(DEVICE), columnwise=columnwise),
        quantize(values, columnwise=columnwise),
        strict=True,
    ):
        assert torch.equal(mine.view(torch.uint8).cpu(), theirs.view(torch.uint8))


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_step_is_that_of_one_process(driver: str) -> None:
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    reference = reference_of(model)
    call = drive(shard_on(model, mesh_of()), driver)
    for tokens in batches(2):
        loss, expected = call(tokens.to(DEVICE)), reference(tokens.to(DEVICE))
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-5)
        loss.backward()
        expected.backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), other.grad, rtol=1e-3, atol=2e-5)


def needs_products() -> None:
    obstacle = obstacle_to_scaled_matmul(DEVICE)
    if obstacle:
        pytest.skip(f"scaled_matmul {obstacle}")


@pytest.mark.cuda_only
@pytest.mark.parametrize("rows", [1, 100, 256])
def test_the_product_of_the_device(rows: int) -> None:
    """Of the same quantised numbers, in bf16: within bf16's rounding of a sum of 256 products."""
    needs_products()
    x, matrix = torch.randn(rows, 256, device=DEVICE), torch.randn(384, 256, device=DEVICE)
    planes = quantize(matrix)
    found = scaled_matmul(x, planes, torch.bfloat16)
    padded = F.pad(x, (0, 0, 0, -rows % 32))
    expected = dequantize(*quantize(padded))[:rows] @ dequantize(*planes).t()
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=0.25)


@pytest.mark.cuda_only
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_layer_computes_with_products_of_the_device(driver: str) -> None:
    needs_products()
    layer = nn.Linear(256, 384, device=DEVICE, dtype=torch.bfloat16)
    plain = nn.Linear(256, 384, device=DEVICE, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    policy = MixedPrecisionPolicy(
        compute_weights="mxfp8", scaled_matmul=True, main_grads_dtype=torch.float32
    )
    fully_shard(layer, mesh_of(), None, policy)
    x = torch.randn(64, 256, device=DEVICE, dtype=torch.bfloat16)
    found, expected = drive(layer, driver)(x), plain(x)
    # MXFP8 has 3 bits of mantissa: 3 % for each factor, with random signs over 256 products.
    assert (found - expected).float().norm() < 0.1 * expected.float().norm()
    found.sum().backward()
    expected.sum().backward()
    gradient = full(layer.weight.grad)
    torch.testing.assert_close(gradient, plain.weight.grad.float(), **BF16_ROUNDING)
