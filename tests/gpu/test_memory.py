"""The allocator's peak inside of a step is the plan's; gathered memory is aligned for vector loads.

What is counted: bytes that a forward and a backward have allocated at once beyond those in use
before, by the allocator's own records (CUDA rounds each allocation up to 512 bytes). Weights,
optimizer state, batches and the workspaces of cuBLAS are in use before; so are the gradients of an
earlier microbatch, which plans count as always there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import compile_fsdp
from benchmarks.plan_against_truth import live_bytes
from tests.gpu.loopback import world_of
from tests.gpu.support import DEVICE, ON_CUDA, drive, floats, shard, stack
from tests.training import adamw, train

TOLERANCE = 0.05

# Large enough on a GPU that what a library allocates for itself in a call is lost in it.
ACTIVATIONS = {"rows": 65536, "width": 256} if ON_CUDA else {"rows": 4096, "width": 64}


def peak_of(step: Callable[[], object]) -> int:
    """The most bytes that ``step`` has in use at once beyond those that were before it."""
    if not ON_CUDA:
        return live_bytes(step)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    step()
    return torch.cuda.max_memory_allocated(DEVICE) - before


def planned_and_measured(
    ranks: int, inner: str, *, rows: int, width: int, recompute: bool = False
) -> tuple[int, int]:
    """Bytes at the peak of the second microbatch, as planned and as the allocator has them."""
    with world_of(ranks):
        model = shard(stack(width, recompute=recompute))
        call = drive(model, inner)
        (batch,) = floats(1, rows, width)
        with compile_fsdp.capture() as seen:
            call(*batch).backward()
        # Once more: what is made once, such as workspaces, is there then.
        call(*batch).backward()
        measured = peak_of(lambda: call(*batch).backward())
        curves = [graph.memory for graph in seen.explanation.graphs]
        return max(point.total for curve in curves for point in curve), measured


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("ranks", [1, 16])
def test_the_peak_of_activations(ranks: int, recompute: bool) -> None:
    """A large batch: activations are most of it. One rank's reduction has a result as large as
    its input, which is no part of a plan and small beside them."""
    plan, measured = planned_and_measured(ranks, "aot_eager", recompute=recompute, **ACTIVATIONS)
    assert abs(plan / measured - 1) <= TOLERANCE, f"planned {plan:,}, measured {measured:,} bytes"


@pytest.mark.cuda_only
def test_the_peak_of_weights() -> None:
    """A small batch: gathered weights and packed gradients are most of it. (Gloo's reduction has
    a receiving buffer that NCCL's has not, so this is for a GPU.)"""
    plan, measured = planned_and_measured(16, "aot_eager", rows=32, width=2048)
    assert abs(plan / measured - 1) <= TOLERANCE, f"planned {plan:,}, measured {measured:,} bytes"


def test_the_peak_with_inductor() -> None:
    """Fused kernels leave results out that the plan counts, so it is a bound."""
    plan, measured = planned_and_measured(1, "inductor", **ACTIVATIONS)
    assert measured <= plan * (1 + TOLERANCE), f"planned {plan:,}, measured {measured:,} bytes"


@pytest.mark.parametrize("ranks", [1, 16])
def test_generated_code_counts_on_aligned_weights(ranks: int) -> None:
    """Every gathered buffer is one that Inductor's code takes for aligned, and asserts to be; on a
    GPU each Triton kernel that reads it is compiled for addresses divisible by 16."""
    with world_of(ranks):
        model = shard(stack(blocks=2))
        call = drive(model, "inductor")
        (batch,) = floats(1)
        _, codes = run_and_get_code(lambda: call(*batch).backward())
        assert len(codes) >= 2, "a forward and a backward graph"
        gathered = [buffers_gathered_in(code) for code in codes]
        assert sum(map(len, gathered)) >= 4
        readers = 0
        for code, buffers in zip(codes, gathered, strict=True):
            assert not re.search(r"unshard\.default\) is assumed to be not aligned", code)
            for kernel, argument in kernel_arguments(code, buffers):
                readers += 1
                assert is_divisible(code, kernel, argument), (
                    f"{kernel} is not compiled for an aligned argument {argument}, which is a "
                    f"gathered buffer"
                )
        assert readers or not ON_CUDA, "no Triton kernel reads a gathered buffer"
        for group in model._fsdp_unit.context.groups():
            assert group.model_weight.local.data_ptr() % 16 == 0


def buffers_gathered_in(code: str) -> set[str]:
    """The names of the gathered buffers whose alignment the generated code asserts."""
    return set(re.findall(r"assert_alignment\((\w+), 16, 'torch\.ops\.compile_fsdp\.unshard", code))


def kernel_arguments(code: str, buffers: set[str]) -> list[tuple[str, int]]:
    """Which Triton kernels are given one of ``buffers``, and as which argument."""
    found = []
    for kernel, listed in re.findall(r"^\s*(triton_\w+)\.run\((.*), stream=", code, re.MULTILINE):
        call = ast.parse(f"f({listed})", mode="eval").body
        assert isinstance(call, ast.Call)
        for position, argument in enumerate(call.args):
            names = {each.id for each in ast.walk(argument) if isinstance(each, ast.Name)}
            if names & buffers:
                found.append((kernel, position))
    return found


def is_divisible(code: str, kernel: str, argument: int) -> bool:
    """Whether Triton may take this argument of a kernel for divisible by 16."""
    start = code.index(f"{kernel} = async_compile.triton(")
    configs = re.search(r"'configs': \[(\{.*?\})\]", code[start:])
    assert configs is not None, f"{kernel} has no list of what its arguments are"
    described = ast.literal_eval(configs[1])
    return ["tt.divisibility", 16] in described.get((argument,), [])


def test_reading_generated_code() -> None:
    """The functions above, on the lines of Inductor's code that they look for."""
    code = """
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''
    triton_meta={'signature': {'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32'},
    'configs': [{(0,): [['tt.divisibility', 16]], (2,): [['tt.divisibility', 16]]}]},
''', device_str='cuda')
        assert_alignment(buf1, 16, 'torch.ops.compile_fsdp.unshard.default')
        triton_poi_fused_0.run(buf1, reinterpret_tensor(buf1, (4, ), (1, ), 0), 64, stream=stream0)
        triton_poi_fused_0.run(buf2, buf3, 64, stream=stream0)
"""
    assert buffers_gathered_in(code) == {"buf1"}
    found = kernel_arguments(code, {"buf1"})
    assert found == [("triton_poi_fused_0", 0), ("triton_poi_fused_0", 1)]
    assert [is_divisible(code, *each) for each in found] == [True, False]


@pytest.mark.cuda_only
def test_no_weight_is_cloned_for_its_alignment() -> None:
    """Inductor clones misaligned inputs before every call: a step would need memory for another
    copy of the weights, which are most of this model."""
    with world_of(1):
        model = shard(stack(width=1024, blocks=2))
        call = drive(model, "inductor")
        batches = floats(2, width=1024)
        train(model, batches, call=call, make_optimizer=adamw)
        weights = sum(each.numel() * each.element_size() for each in model.parameters())
        with torch.no_grad():
            call(*batches[0])
            peak = peak_of(lambda: call(*batches[0]))
    assert peak < weights / 4, f"an evaluation takes {peak:,} bytes beside {weights:,} of weights"
