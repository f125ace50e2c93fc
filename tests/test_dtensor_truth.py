"""Everything that a sharded model's DTensors say is what one process would say."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from compile_fsdp.runtime.parameter import get_containing_parameter_group
from tests.distributed import run
from tests.sharded_models import WAYS, batches, pair
from tests.training import full, local_batch

some_ways = pytest.mark.parametrize("way", ["packed", "tensors", "hfsdp"])
most_ways = pytest.mark.parametrize("way", ["packed", "many ranks", "hsdp", "hfsdp"])


def with_gradients(way: str) -> tuple[nn.Module, nn.Module]:
    model, sharded = pair(way)
    (batch,) = batches(1)
    model(*batch).backward()
    sharded(*local_batch(batch)).backward()
    return model, sharded


def parameters(way: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    model, sharded = pair(way)
    for (name, whole), part in zip(model.named_parameters(), sharded.parameters(), strict=True):
        yield name, whole, part


ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": torch.clone,
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "arithmetic": lambda p: (2 * p + p * p).sqrt().nan_to_num().clamp_min(0.5),
    "in place": lambda p: p.detach().clone().mul_(3.0).add_(p, alpha=0.5),
    "out": lambda p: torch.add(p.detach(), p.detach(), out=torch.empty_like(p)),
    "where": lambda p: torch.where(p > 0, p, torch.zeros_like(p)),
    "masked": lambda p: p.detach().masked_fill(p < 0, 7.0),
    "dtype": lambda p: p.to(torch.float64) * 2,
    "foreach": lambda p: torch._foreach_add(torch._foreach_mul([p, p], 3.0), [p, p])[1],
    "first row": lambda p: p * p.detach().clone().view(p.shape).sum(),
}
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.max,
    "min": torch.min,
    "amax": torch.amax,
    "argmax": torch.argmax,
    "abs max": lambda p: p.abs().max(),
    "prod": torch.prod,
    "std": lambda p: p.std(correction=0),
    "norm": torch.norm,
    "norm 1": lambda p: torch.linalg.vector_norm(p, 1),
    "norm inf": lambda p: torch.linalg.vector_norm(p, float("inf")),
    "norm -inf": lambda p: torch.linalg.vector_norm(p, -float("inf")),
    "norm 0": lambda p: torch.linalg.vector_norm(p, 0),
    "foreach norm": lambda p: torch._foreach_norm([p, p])[1],
    "foreach norm inf": lambda p: torch._foreach_norm([p], float("inf"))[0],
    "foreach max": lambda p: torch._foreach_max([p, p])[1],
    "all": lambda p: (p == p).all(),
    "count": lambda p: torch.count_nonzero(p > 0),
}
ALONG_DIMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum 0": lambda p: p.sum(0),
    "sum -1": lambda p: p.sum(-1, keepdim=True),
    "mean 0": lambda p: p.mean(0, keepdim=True),
    "mean -1": lambda p: p.mean(-1),
    "max 0": lambda p: p.max(0).values,
    "max -1": lambda p: p.max(-1).indices,
    "norm 0": lambda p: torch.linalg.vector_norm(p, dim=0),
    "norm -1": lambda p: torch.norm(p, dim=-1, keepdim=True),
    "softmax 0": lambda p: p.softmax(0),
    "softmax -1": lambda p: p.softmax(-1),
    "cumsum 0": lambda p: p.cumsum(0),
    "sort 0": lambda p: p.sort(0).values,
    "sort -1": lambda p: p.sort().values,
    "same rows": lambda p: (
        p.view(p.shape[0], -1).unsqueeze(-1).expand(-1, -1, 2).unsqueeze(1).squeeze(1)
    ),
    "flat": lambda p: p.flatten()[:].add(1.0),
    "flat and back": lambda p: p.reshape(-1).view(p.shape),
    "columns": lambda p: p[:, 1:].unsqueeze(1).transpose(1, 2) if p.ndim == 2 else p[:],
    "outer": lambda p: (p.sum(-1, keepdim=True) @ p.sum(0, keepdim=True)) if p.ndim == 2 else p,
    "gram": lambda p: (
        p.detach().mm(p.detach().mm(p.new_ones(p.shape[-1], 1))).sum()
        if p.ndim == 2 and p.shape[0] == p.shape[1]
        else p
    ),
    "tril": lambda p: p.detach().clone().tril_() if p.ndim == 2 else p,
    "sorted in place": lambda p: p.detach().clone().copy_(p.detach().flip(0)),
    "new zeros": lambda p: p.new_zeros(p.shape) + p.new_ones(p.shape[:1] + (1,) * (p.ndim - 1)),
    "new of another shape": lambda p: p.new_full((3, 2), 4.0),
}
OPERATORS = {**ELEMENTWISE, **REDUCTIONS, **ALONG_DIMS}


def check_operators(way: str) -> None:
    for name, whole, part in parameters(way):
        for label, operator in OPERATORS.items():
            if whole.ndim == 0 and operator in ALONG_DIMS.values():
                continue
            expected, found = operator(whole), operator(part)
            what = f"{label} of {name}"
            assert isinstance(found, DTensor), what
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
            assert found.stride() == expected.stride(), what
            # Sums over ranks add in another order.
            torch.testing.assert_close(full(found), expected.detach(), msg=what)


@pytest.mark.compat
@pytest.mark.parametrize("way", ["packed", "hfsdp"])
def test_operators(way: str) -> None:
    run(WAYS[way][0], check_operators, way)


def check_gradients(way: str) -> None:
    model, sharded = with_gradients(way)
    gradients = []
    for whole, part in zip(model.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(full(part.grad), whole.grad)
        torch.testing.assert_close(full(part.grad.detach().clone() * 2), whole.grad * 2)
        torch.testing.assert_close(full(part.grad.abs().max()), whole.grad.abs().max())
        gradients.append(whole.grad)
    for order in (2.0, 1.0, float("inf")):
        for foreach in (None, True, False):
            found = nn.utils.get_total_norm(
                [each.grad for each in sharded.parameters()], order, foreach=foreach
            )
            expected = nn.utils.get_total_norm(gradients, order, foreach=foreach)
            torch.testing.assert_close(full(found), expected)
    for foreach in (None, True, False):
        expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
        found = nn.utils.clip_grad_norm_(
            sharded.parameters(), 0.1, error_if_nonfinite=True, foreach=foreach
        )
        torch.testing.assert_close(full(found), expected)
    nn.utils.clip_grad_value_(sharded.parameters(), 0.01)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    for whole, part in zip(model.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(full(part.grad), whole.grad)
    # One rank's nan is everybody's, and an error on everybody; replicas have the same.
    if dist.get_rank() % WAYS[way][1][-1] == 0:
        for part in sharded.parameters():
            part.grad.to_local().fill_(float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(sharded.parameters(), 0.1, error_if_nonfinite=True)
    nn.utils.clip_grad_norm_(sharded.parameters(), 0.1)
    for part in sharded.parameters():
        assert full(part.grad).isnan().all()


@most_ways
def test_gradients_and_clipping(way: str) -> None:
    run(WAYS[way][0], check_gradients, way)


def check_copies(way: str) -> None:
    model, sharded = with_gradients(way)
    parts = list(sharded.parameters())
    parts[0].color = "red"
    file = io.BytesIO()
    torch.save([parts, [part.grad for part in parts]], file)
    assert len(file.getvalue()) < 60_000
    file.seek(0)
    loaded, gradients = torch.load(file, weights_only=False)
    copied = copy.deepcopy(parts)
    for index, whole in enumerate(model.parameters()):
        for each in (loaded[index], copied[index]):
            assert isinstance(each, nn.Parameter)
            assert each.requires_grad
            assert get_containing_parameter_group(each) is None
            assert torch.equal(full(each), whole.detach())
            assert torch.equal(full(each + each), 2 * whole.detach())
            each.detach().add_(1.0)
        for each in (gradients[index], copied[index].grad):
            torch.testing.assert_close(full(each), whole.grad)
        # The copies have memory of their own, the parameter its group.
        assert torch.equal(full(parts[index]), whole.detach())
        assert get_containing_parameter_group(parts[index]) is not None
    assert loaded[0].color == copied[0].color == "red"


@some_ways
def test_saving_and_copying(way: str) -> None:
    run(WAYS[way][0], check_copies, way)


def check_autograd(way: str) -> None:
    model, sharded = pair(way)
    for whole, part in zip(model.parameters(), sharded.parameters(), strict=True):
        penalty = (part.square().mean() + part.norm() + part.sum(-1).abs().max()).full_tensor()
        penalty = penalty + part.full_tensor().exp().sum()
        penalty.backward()
        (whole.square().mean() + whole.norm() + whole.sum(-1).abs().max()).backward()
        whole.exp().sum().backward()
        torch.testing.assert_close(full(part.grad), whole.grad)
        torch.testing.assert_close(full(part.grad + part.grad), 2 * whole.grad)
        part.grad = None
        # Every rank's own rows: the gradient of what all ranks have together.
        part.to_local().square().sum().backward()
        torch.testing.assert_close(full(part.grad * 1.0), 2 * whole.detach())


@some_ways
def test_gradients_of_what_is_computed_at_rest(way: str) -> None:
    run(WAYS[way][0], check_autograd, way)


def check_random(way: str) -> None:
    seed = 5
    for _, whole, part in parameters(way):
        if not isinstance(part, DTensor) or whole.ndim == 0:
            continue
        for draw in (nn.init.normal_, nn.init.uniform_):
            torch.manual_seed(seed)
            draw(whole)
            torch.manual_seed(seed + dist.get_rank())
            draw(part)
            assert torch.equal(full(part), whole.detach())
        torch.manual_seed(seed)
        noise = torch.rand_like(whole)
        torch.manual_seed(seed + dist.get_rank())
        drawn = torch.rand_like(part)
        assert drawn.to_local().shape == part.to_local().shape
        assert torch.equal(full(drawn), noise.detach())


@some_ways
def test_random_values_are_those_of_rank_zero(way: str) -> None:
    """Ranks whose generators differ must not give rows, or replicas, values of their own."""
    run(WAYS[way][0], check_random, way)


def check_refusals() -> None:
    _, sharded = pair("packed")
    weight, bias = sharded.up._parameters["weight"], sharded.up._parameters["bias"]
    for view in (
        lambda: weight[0],
        lambda: weight[1:],
        lambda: weight.t(),
        lambda: weight.unsqueeze(0),
        lambda: sharded.down._parameters["weight"].detach().view(1, -1),
        lambda: torch.diagonal(weight),
    ):
        with pytest.raises(RuntimeError, match=r"Use full_tensor\(\) for a copy"):
            view()
    with pytest.raises(RuntimeError, match="expected DTensors or scalars only"):
        weight * torch.ones(6)
    with pytest.raises(RuntimeError, match="would change the shape of a sharded tensor"):
        bias.detach().squeeze_().unsqueeze_(0)
    with pytest.raises(RuntimeError, match="expected its own placements"):
        weight.to_local(grad_placements=[Replicate()])
    with pytest.raises(RuntimeError, match="broadcast"):
        weight + sharded.down._parameters["weight"]


def test_what_has_no_right_answer_is_refused() -> None:
    run(2, check_refusals)
