"""FsdpParameterGroup alone, without a driver: each of its contracts, called step by step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from compile_fsdp import (
    BlockAtomic,
    Flat,
    MixedPrecisionPolicy,
    Placements,
    ShardLayout,
    fully_shard,
    fully_shard_optimizer,
)
from compile_fsdp.runtime import collectives
from compile_fsdp.runtime.parameter_group import (
    _CONTAINING_PARAMETER_GROUP_ATTR,
    FsdpParameterGroup,
    Phase,
    get_containing_parameter_group,
    sync_model_weights_from_main_weights,
)
from compile_fsdp.runtime.recording import Recorder
from compile_fsdp.runtime.streams import lanes_made_by
from tests.distributed import distributed
from tests.modes import ONE_AXIS, TWO_AXES, Mode, mesh_of
from tests.training import cpu_mesh, full

ZERO1, ZERO2, ZERO3 = ONE_AXIS[1:]
HSDP, HFSDP = TWO_AXES[4:]


def make_group(
    module: nn.Module,
    mode: Mode = ZERO3,
    mesh: DeviceMesh | None = None,
    *,
    parameters: Mapping[str, nn.Parameter] | None = None,
    policy: MixedPrecisionPolicy | None = None,
    shard: Shard | None = None,
    **options: Any,
) -> FsdpParameterGroup:
    """A group of all of ``module``'s parameters, that no fully_shard knows of."""
    mesh = mesh or mesh_of((2,))
    placements = mode.on(mesh, shard or Shard(0))
    return FsdpParameterGroup(
        module,
        dict(module.named_parameters()) if parameters is None else parameters,
        mesh,
        placements.parameter,
        placements.gradient,
        placements.optimizer,
        policy or MixedPrecisionPolicy(),
        **options,
    )


def contribute(group: FsdpParameterGroup, *values: float) -> None:
    """One backward's gradients: every element of parameter i is ``values[i]`` times rank + 1."""
    for parameter, value in zip(group.parameters, values, strict=True):
        gradient = torch.full_like(parameter.unsharded, value * (dist.get_rank() + 1))
        parameter.unsharded.grad = gradient
    partial = group.allocate_partial_grad_buffer()
    group.copy_gradients_to_partial_buffer(partial)
    group.reduce_inner_gradients(partial)


def everywhere(tensor: torch.Tensor | None, value: float) -> bool:
    return tensor is not None and bool((full(tensor).float() == value).all())


# Construction -----------------------------------------------------------------------------------


def test_the_signature_is_the_documented_one() -> None:
    parameters = inspect.signature(FsdpParameterGroup).parameters
    assert list(parameters) == [
        "owning_module",
        "fqn_to_parameter",
        "mesh",
        "model_weight_placements",
        "main_grad_placements",
        "main_weight_placements",
        "mixed_precision_policy",
        "grad_scale",
        "use_symmetric_memory",
        "parameter_to_owner",
        "shard_layout",
    ]
    defaults = {name: each.default for name, each in list(parameters.items())[7:]}
    assert defaults == {
        "grad_scale": 1.0,
        "use_symmetric_memory": False,
        "parameter_to_owner": None,
        "shard_layout": ShardLayout.PADDED,
    }
    assert _CONTAINING_PARAMETER_GROUP_ATTR == "_mfsdp_parameter_group"


@distributed(2)
def test_order_is_tensor_order_and_a_tied_parameter_counts_once() -> None:
    module = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 2, bias=False)})
    module["c"] = nn.Linear(4, 4, bias=False)
    module["c"].weight = module["a"].weight
    names = ("b.weight", "a.weight", "c.weight")
    group = make_group(module, parameters={name: module.get_parameter(name) for name in names})
    assert [parameter.fqns for parameter in group.parameters] == [
        ("b.weight",),
        ("a.weight", "c.weight"),
    ]
    assert group.layout.tensor_shapes == ((2, 4), (4, 4))


@distributed(2)
def test_a_parameter_is_frozen_and_compared_by_identity() -> None:
    first, second = make_group(nn.Linear(4, 4)).parameters
    assert first != second and first == first and len({first, second}) == 2
    with pytest.raises(FrozenInstanceError):
        first.fqns = ()


@distributed(2)
def test_attributes_requires_grad_and_the_group_survive_on_both_forms() -> None:
    with torch.device("meta"):
        on_meta = nn.Linear(4, 4)
    for module in (nn.Linear(4, 4), on_meta):
        module.requires_grad_(False)
        module.weight.note = "mine"
        group = make_group(module)
        weight = group.parameters[0]
        for form in (weight.sharded, weight.unsharded):
            assert form.note == "mine"
            assert not form.requires_grad and not form.is_meta
            assert get_containing_parameter_group(form) is group
            assert getattr(form, _CONTAINING_PARAMETER_GROUP_ATTR)() is group
        assert (weight.unsharded is module.weight) == (module is not on_meta)


@distributed(2)
def test_flat_and_blocks_keep_their_promise() -> None:
    """``Flat`` allows any cut, of which those between rows are some."""
    for shard, rows in ((Flat(), 1), (BlockAtomic(4), 4)):
        module = nn.Linear(3, 10)
        value = module.weight.detach().clone()
        group = make_group(module, shard=shard)
        first, held = group.layout.rows(0, dist.get_rank())
        assert first % rows == 0
        assert group.parameters[0].sharded.to_local().shape == (held, 3)
        assert torch.equal(full(group.parameters[0].sharded), value)


# Buffers ----------------------------------------------------------------------------------------


@distributed(2)
def test_equal_buffers_are_the_same_memory() -> None:
    half = MixedPrecisionPolicy()
    same = make_group(nn.Linear(4, 4))
    assert same.main_weight is same.model_weight
    wider = make_group(nn.Linear(4, 4), ZERO1)
    assert wider.main_weight is wider.post_optimizer_model_weight is not wider.model_weight
    mixed = make_group(nn.Linear(4, 4).to(torch.bfloat16), ZERO1, policy=half)
    assert mixed.main_weight.dtype == torch.float32
    assert mixed.post_optimizer_model_weight.dtype == torch.bfloat16
    for group in (same, wider, mixed):
        start, stop = group.post_optimizer_model_weight.segment
        part = group.model_weight.local[
            start - group.model_weight.segment[0] : stop - group.model_weight.segment[0]
        ]
        assert group.post_optimizer_model_weight.local.data_ptr() == part.data_ptr()
        buffers = (group.main_weight, group.main_grad, group.pre_optimizer_main_grad)
        assert {buffer.layout for buffer in buffers} == {group.layout}


@distributed(2)
def test_gradient_buffers_are_none_exactly_when_frozen() -> None:
    frozen = make_group(nn.Linear(4, 4).requires_grad_(False))
    assert frozen.main_grad is None and frozen.pre_optimizer_main_grad is None
    trained = make_group(nn.Linear(4, 4))
    assert trained.main_grad is not None and trained.pre_optimizer_main_grad is not None
    partial = trained.allocate_partial_grad_buffer()
    with pytest.raises(RuntimeError, match="is frozen and has no gradients"):
        frozen.reduce_inner_gradients(partial)


@distributed(2)
def test_the_pre_optimizer_gradient_is_a_view_of_the_main_gradient() -> None:
    group = make_group(nn.Linear(4, 4), ZERO1)
    contribute(group, 1.0, 2.0)
    start, stop = group.pre_optimizer_main_grad.segment
    part = group.main_grad.local[start:stop]
    assert group.pre_optimizer_main_grad.local.data_ptr() == part.data_ptr()
    assert group.main_grad.placements == (Partial("avg"),)


@distributed(2)
def test_dtypes_of_the_policy() -> None:
    bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
    policy = MixedPrecisionPolicy(fp32, main_grads_dtype=fp32, grad_comm_dtype=fp64)
    group = make_group(nn.Linear(4, 4).to(bf16), policy=policy)
    partial = group.allocate_partial_grad_buffer()
    assert group.grad_comm_dtype == partial.dtype == fp64
    assert partial.placements == (Partial("avg"),)
    assert partial.local.numel() == group.layout.size
    contribute(group, 1.0, 2.0)
    assert group.main_grad.dtype == fp32
    weight = group.parameters[0].sharded
    assert weight.grad_dtype == weight.grad.dtype == fp32
    default = make_group(nn.Linear(4, 4).to(bf16))
    assert default.grad_comm_dtype == default.main_grad.dtype == bf16


# Unsharding -------------------------------------------------------------------------------------


@distributed(2)
def test_compute_waits_for_the_event_of_its_phase_only() -> None:
    first, second = make_group(nn.Linear(4, 4)), make_group(nn.Linear(4, 4))
    second.context = first.context
    recorder = Recorder()
    with lanes_made_by(recorder.make_lane):
        first.context.renew_lanes()
        first.unshard_parameters(Phase.FORWARD)
        forward = str(recorder.log[-1])
        second.unshard_parameters(Phase.BACKWARD)
        backward = str(recorder.log[-1])
    assert forward.startswith("gather: event") and backward.startswith("gather: event")
    first.wait_for_unshard(Phase.FORWARD)
    assert str(recorder.log[-1]) == forward.replace("gather: event", "compute: waits for event")
    second.wait_for_unshard(Phase.BACKWARD)
    assert str(recorder.log[-1]) == backward.replace("gather: event", "compute: waits for event")


@distributed(2)
def test_unsharding_twice_gathers_once() -> None:
    group = make_group(nn.Linear(4, 4))
    with collectives.recorded() as records:
        group.unshard_parameters(Phase.FORWARD)
        group.unshard_parameters(Phase.BACKWARD)
        group.wait_for_unshard(Phase.BACKWARD)
    assert [record.kind for record in records] == ["all_gather"]
    group.reshard_parameters()
    assert not group.is_unsharded
    with pytest.raises(RuntimeError, match=r"wait_for_unshard was called while .* are sharded"):
        group.wait_for_unshard()


@distributed(2)
def test_saved_views_come_back_with_the_next_unshard() -> None:
    """Autograd keeps the full weight as an object; its memory may go and come meanwhile."""
    module = nn.Linear(4, 4)
    value = module.weight.detach().clone()
    group = make_group(module)
    group.unshard_parameters()
    group.wait_for_unshard()
    unsharded = group.parameters[0].unsharded
    view, version = unsharded.detach().t(), unsharded._version
    storage = unsharded.untyped_storage()
    x = torch.randn(2, 4, requires_grad=True)
    loss = (x @ unsharded.t()).sum()
    group.release_unsharded_storage(rowwise_only=True)
    assert group.is_unsharded and storage.nbytes() > 0
    group.release_unsharded_storage()
    assert not group.is_unsharded and storage.nbytes() == 0
    group.unshard_parameters()
    group.wait_for_unshard()
    assert torch.equal(view, value.t()) and unsharded._version == version
    loss.backward()  # autograd finds the version it saved
    torch.testing.assert_close(x.grad, value.sum(0).expand(2, 4))


@pytest.mark.parametrize("mode", [ZERO1, ZERO2], ids=lambda mode: mode.name)
@distributed(2)
def test_a_sync_marks_a_wider_model_weight_stale_until_the_next_unshard(mode: Mode) -> None:
    group = make_group(nn.Linear(4, 4), mode)
    group.syncs_with_optimizer = True
    group.unshard_parameters()
    with collectives.recorded() as records:
        group.unshard_parameters()
        assert not records
        group.main_weight.local.fill_(3.0)
        sync_model_weights_from_main_weights([each.sharded for each in group.parameters])
        assert not records  # the step writes its own part only
        group.unshard_parameters()
        group.unshard_parameters()
        group.wait_for_unshard()
    assert [record.kind for record in records] == ["all_gather"]
    assert all((each.unsharded == 3.0).all() for each in group.parameters)


@distributed(2)
def test_what_becomes_trainable_may_be_stepped_by_somebody_else() -> None:
    """An optimizer that tells of its steps has the weight; nobody knows who has the bias now."""
    module = nn.Linear(4, 4)
    fully_shard(module, cpu_mesh())
    module.bias.requires_grad_(False)
    (group,) = module.fsdp_parameter_groups
    optimizer = torch.optim.SGD([module.weight], lr=0.1)
    fully_shard_optimizer(optimizer)
    for trainable in (False, True):
        module.bias.requires_grad_(trainable)
        module(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        assert group.syncs_with_optimizer == (not trainable)


@distributed(2)
def test_each_group_is_synced_once_and_others_are_ignored() -> None:
    group = make_group(nn.Linear(4, 4).to(torch.bfloat16))
    calls = []

    class Watched(FsdpParameterGroup):
        def sync_model_weight_from_main_weight(self) -> None:
            calls.append(self)
            super().sync_model_weight_from_main_weight()

    group.__class__ = Watched
    forms = [form for each in group.parameters for form in (each.sharded, each.unsharded)]
    group.main_weight.local.fill_(0.25)
    sync_model_weights_from_main_weights([*forms, torch.zeros(2), nn.Parameter(torch.zeros(2))])
    assert calls == [group]
    assert (group.model_weight.local == 0.25).all()


# Gradients --------------------------------------------------------------------------------------


@distributed(2)
def test_gradients_move_into_the_partial_buffer() -> None:
    group = make_group(nn.Linear(4, 4))
    weight, bias = group.parameters
    weight.unsharded.grad = torch.arange(16.0).view(4, 4)
    partial = group.allocate_partial_grad_buffer()
    partial.local.fill_(float("nan"))
    assert group.copy_gradients_to_partial_buffer(partial) == (0,)
    assert torch.equal(partial.get_local_tensor(0), torch.arange(16.0).view(4, 4))
    assert (partial.get_local_tensor(1) == 0).all()
    assert weight.unsharded.grad is None and bias.unsharded.grad is None


@distributed(2)
def test_each_contribution_is_averaged_and_scaled_and_the_first_one_writes() -> None:
    group = make_group(nn.Linear(4, 4), grad_scale=0.5)
    weight, bias = (each.sharded for each in group.parameters)
    contribute(group, 2.0, 4.0)  # the ranks' average is 1.5 times that
    assert everywhere(weight.grad, 1.5) and everywhere(bias.grad, 3.0)
    group.grad_scale = 0.25
    contribute(group, 4.0, 4.0)
    assert everywhere(weight.grad, 3.0) and everywhere(bias.grad, 4.5)
    for parameter in (weight, bias):
        parameter.grad = None
    contribute(group, 4.0, 4.0)
    assert everywhere(weight.grad, 1.5) and everywhere(bias.grad, 1.5)


@distributed(2)
def test_a_gradient_is_a_dtensor_over_the_buffer() -> None:
    group = make_group(nn.Linear(4, 4))
    contribute(group, 1.0, 1.0)
    for index, parameter in enumerate(group.parameters):
        gradient = parameter.sharded.grad
        assert isinstance(gradient, DTensor) and gradient.placements == (Shard(0),)
        piece = group.main_grad.get_local_tensor(index)
        assert gradient.to_local().shape == piece.shape
        assert not piece.numel() or gradient.to_local().data_ptr() == piece.data_ptr()


@pytest.mark.parametrize("mode", [HSDP, HFSDP], ids=lambda mode: mode.name)
@distributed(4)
def test_the_outer_reduction_finishes_into_the_optimizers_view(mode: Mode) -> None:
    group = make_group(nn.Linear(4, 4), mode, mesh_of((2, 2)))
    weight = group.parameters[0].sharded
    contribute(group, 1.0, 1.0)
    contribute(group, 1.0, 1.0)
    assert weight.grad.placements == (Partial("avg"), Shard(0))
    group.reduce_outer_gradients()
    assert weight.grad.placements == weight.placements
    assert everywhere(weight.grad, 2 * 2.5)
    piece = group.pre_optimizer_main_grad.get_local_tensor(0)
    assert not piece.numel() or weight.grad.to_local().data_ptr() == piece.data_ptr()
    with collectives.recorded() as records:
        group.reduce_outer_gradients()  # nothing is new
    assert not records and everywhere(weight.grad, 2 * 2.5)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("mode", [ZERO1, ZERO3, HSDP, HFSDP], ids=lambda mode: mode.name)
@distributed(4)
def test_after_a_step_the_main_gradient_starts_anew(mode: Mode, set_to_none: bool) -> None:
    mesh = mesh_of((4,) if len(mode.placements) == 5 else (2, 2))
    group = make_group(nn.Linear(4, 4), mode, mesh)
    optimizer = torch.optim.SGD([each.sharded for each in group.parameters], lr=0.0)
    for value in (1.0, 3.0):
        for _ in range(2):
            contribute(group, value, value)
        group.reduce_outer_gradients()
        assert all(everywhere(each.sharded.grad, 2 * 2.5 * value) for each in group.parameters)
        optimizer.zero_grad(set_to_none=set_to_none)


@distributed(2)
def test_a_partial_buffer_that_is_not_the_groups_is_refused() -> None:
    group, other = make_group(nn.Linear(4, 4)), make_group(nn.Linear(8, 4))
    with pytest.raises(ValueError, match=r"must have layout .* allocate_partial_grad_buffer\(\)"):
        group.reduce_inner_gradients(other.allocate_partial_grad_buffer())
    with pytest.raises(ValueError, match=r"must have dtype torch.float32, found torch.float64"):
        group.reduce_inner_gradients(group.allocate_partial_grad_buffer().cast(torch.float64))
    with pytest.raises(ValueError, match=r"must have placements \(Partial\(avg\),\)"):
        group.reduce_inner_gradients(group.main_grad)


@distributed(2)
def test_placements_that_do_not_fit_the_mesh_are_refused_by_axis() -> None:
    module, mesh = nn.Linear(4, 4), cpu_mesh()
    two = Placements(("outer", "inner"), *[(Shard(0), Shard(0))] * 3)
    with pytest.raises(ValueError, match=r"parameter placements: expected one for each .*'dp'"):
        FsdpParameterGroup(
            module,
            dict(module.named_parameters()),
            mesh,
            two.parameter,
            two.gradient,
            two.optimizer,
            MixedPrecisionPolicy(),
        )
    assert not module.weight.__dict__
