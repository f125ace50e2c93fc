"""What a user can get wrong when sharding: each its own error, which names the axis or the
parameter, says what was expected and found, and what to do; and the module stays as it was.

Illegal placements by themselves are in ``test_placement.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2Policy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from compile_fsdp import (
    BlockAtomic,
    Placements,
    ShardLayout,
    TensorAtomic,
    fully_shard,
    microbatch,
)
from compile_fsdp.argument_checks import check_backend
from compile_fsdp.runtime.parameter_group import Phase
from tests.distributed import distributed
from tests.modes import mesh_of
from tests.training import cpu_mesh

R, S, A, T = Replicate(), Shard(0), Partial("avg"), TensorAtomic()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def owners(sharded: nn.Module, owner: object) -> dict[Any, Any]:
    return dict.fromkeys(sharded.parameters(), owner)


LESS_SHARDED = r"optimizer placement of axis 'dp' is R.* but the {} .*Shard the optimizer on 'dp'"
NOT_A_SUFFIX = r"{} placements .*axis 'dp' is sharded but an axis inside .*shard the inner axes"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((("dp",), (S,), (S,), (R,)), LESS_SHARDED.format("parameter")),
        ((("dp",), (R,), (S,), (R,)), LESS_SHARDED.format("gradient")),
        ((("dp", "tp"), (S, R), (A, A), (S, S)), NOT_A_SUFFIX.format("parameter")),
        ((("dp", "tp"), (R, R), (S, A), (S, S)), NOT_A_SUFFIX.format("gradient")),
        ((("dp", "tp"), (R, R), (A, A), (S, R)), NOT_A_SUFFIX.format("optimizer")),
        (
            (("dp",), (Shard(1),), (S,), (S,)),
            r"parameter placement of axis 'dp': expected Shard\(0\), found .*1.* use Shard\(0\)",
        ),
        (
            (("dp",), (S,), (Shard(-1),), (S,)),
            r"gradient placement of axis 'dp': expected Shard\(0\), found .*-1",
        ),
        (
            (("dp", "dp"), (R, S), (A, S), (R, S)),
            r"dp_axes: expected distinct axes, found \('dp', 'dp'\)",
        ),
        (
            (("dp",), (S, S), (S,), (S,)),
            r"parameter placements: expected one for each of the axes \('dp',\), found 2",
        ),
        (
            (("dp",), (S,), (), (S,)),
            r"gradient placements: expected one for each of the axes \('dp',\), found 0",
        ),
        (
            (("a", "b"), (R, T), (A, T), (R, T)),
            r"TensorAtomic needs exactly one data-parallel axis .* found \('a', 'b'\)",
        ),
        (
            (("dp",), (S,), (Partial("sum"),), (S,)),
            r"gradient placement of axis 'dp': expected .*Partial\(\"avg\"\), found P",
        ),
        ((("dp",), (A,), (A,), (S,)), r"axis 'dp': expected .*found P.*only gradients are partial"),
        (
            (("dp",), (R,), (R,), (R,)),
            r"expected Partial\(\"avg\"\) or Shard.*Use Partial",
        ),
    ],
)
def test_illegal_placements(arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Placements(*arguments)


def test_illegal_blocks() -> None:
    with pytest.raises(ValueError, match="at least 1 row a block, got 0"):
        BlockAtomic(0)
    with pytest.raises(TypeError, match=r"rows must be a whole number, got 2\.5"):
        BlockAtomic(2.5)


@pytest.mark.parametrize(
    ("placements", "reason"),
    [
        (
            Placements(("dp", 0), (R, S), (A, S), (R, S)),
            r"dp_axes \('dp', 0\) name one mesh axis twice",
        ),
        (Placements(("data",), (S,), (S,), (S,)), r"mesh \(dp=2\) has no axis named 'data'"),
        (
            Placements((1,), (S,), (S,), (S,)),
            r"axis 1 is out of range for the 1-D mesh \(dp=2\)",
        ),
    ],
)
@distributed(2)
def test_axes_that_the_mesh_does_not_have(placements: Placements, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        fully_shard(model(), cpu_mesh(), placements)
    with pytest.raises(ValueError, match=r"hsdp\(mesh\): expected a 2-D mesh, found 1-D"):
        Placements.hsdp(cpu_mesh())


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({}, ValueError, r"parameter '0.weight' has no owner; pass parameter_to_owner"),
        ({"owner": 2}, ValueError, r"'0.weight': expected a rank .* 'dp', 0..1, found 2"),
        ({"owner": -1}, ValueError, r"'0.weight': expected a rank .* 'dp', 0..1, found -1"),
        ({"owner": "0"}, TypeError, r"'0.weight': expected a rank, found '0' of type str"),
        ({"owner": True}, TypeError, r"'0.weight': expected a rank, found True of type bool"),
    ],
)
@distributed(2)
def test_owners(options: dict[str, Any], error: type[Exception], reason: str) -> None:
    sharded = model()
    before = dict(sharded.named_parameters())
    atomic = Placements(("dp",), (T,), (T,), (T,))
    given = owners(sharded, options["owner"]) if options else None
    with pytest.raises(error, match=reason):
        fully_shard(sharded, cpu_mesh(), atomic, parameter_to_owner=given)
    partly = {sharded[0].weight: 0, sharded[0].bias: 1}
    with pytest.raises(ValueError, match=r"parameter '1.weight' has no owner"):
        fully_shard(sharded, cpu_mesh(), atomic, parameter_to_owner=partly)
    assert dict(sharded.named_parameters()) == before
    assert all(not each.__dict__ for each in before.values())


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"shard_layout": "packed"}, TypeError, r"shard_layout must be .*'packed'.*PACKED"),
        ({"grad_scale": "1"}, TypeError, "grad_scale must be a number, got str"),
        ({"grad_scale": float("nan")}, ValueError, "grad_scale must be finite, got nan"),
        ({"parameter_to_owner": [0, 1]}, TypeError, "parameter_to_owner must be a mapping"),
        ({"placements": (S,)}, TypeError, "placements must be a Placements or None, got tuple"),
        ({"mixed_precision_policy": "bf16"}, TypeError, "must be a MixedPrecisionPolicy or None"),
        (
            {"mixed_precision_policy": FSDP2Policy()},
            TypeError,
            r"got torch\.distributed\.\S+\.MixedPrecisionPolicy; pass compile_fsdp.MixedPrec",
        ),
        (
            {"use_symm_mem": "yes"},
            TypeError,
            "use_symm_mem must be True, False or 'if_available', g",
        ),
        ({"use_symm_mem": 1}, TypeError, "use_symm_mem must be True, False or .*, got 1"),
        (
            {"unify_communication_stream": "gather"},
            TypeError,
            "unify_communication_stream must be True or False, got 'gather'",
        ),
    ],
)
@distributed(2)
def test_options(options: dict[str, Any], error: type[Exception], reason: str) -> None:
    sharded = model()
    with pytest.raises(error, match=reason):
        fully_shard(sharded, cpu_mesh(), **options)
    assert type(sharded) is nn.Sequential


@distributed(2)
def test_wrapped_in_ddp() -> None:
    wrapped = nn.parallel.DistributedDataParallel(model())
    for module in (wrapped, nn.Sequential(wrapped)):
        with pytest.raises(TypeError, match=r"DistributedDataParallel.*\(its \.module\)"):
            fully_shard(module, cpu_mesh())
    assert type(wrapped.module) is nn.Sequential


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@distributed(2)
def test_cuda_where_there_is_none() -> None:
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
    sharded = model()
    reason = "built without CUDA; install" if torch.version.cuda is None else "finds no GPU: look"
    for module in (sharded, sharded.to("meta")):
        with pytest.raises(ValueError, match=rf"is for 'cuda' .* there is none: .*{reason}.*'cpu'"):
            fully_shard(module, mesh)
        assert type(sharded) is nn.Sequential


@distributed(2)
def test_devices_of_other_kinds() -> None:
    mesh = init_device_mesh("xpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match=r"is for 'xpu' devices; expected 'cuda' or 'cpu'. Build"):
        fully_shard(model(), mesh)


@distributed(2)
def test_modules_on_cuda_and_a_mesh_on_cpu() -> None:
    """A fake tensor says that it is on a device that is not there."""
    with FakeTensorMode():
        sharded = model()
        sharded[1].weight = nn.Parameter(torch.empty(2, 4, device="cuda:0"))
    reason = r"'1.weight' is on cuda:0 but .* for 'cpu'.*module.to\('cpu'\).*mesh\('cuda', ...\)"
    with pytest.raises(ValueError, match=reason):
        fully_shard(sharded, cpu_mesh())


@pytest.mark.parametrize(
    ("found", "device_type", "reason"),
    [
        ("gloo", "cuda", "axis 'dp' communicates by 'gloo'; expected 'nccl'. {}"),
        (None, "cuda", "axis 'dp' communicates by no backend at all; expected 'nccl'. {}"),
        (
            None,
            "cpu",
            "axis 'dp' communicates by no .*; expected 'gloo'. Call .*'cpu:gloo,cuda:nccl'",
        ),
        (
            "nccl",
            "cpu",
            "axis 'dp' communicates by 'nccl'; expected 'gloo'. Call init_process_group",
        ),
    ],
)
def test_backends_that_do_not_serve_a_device(
    found: str | None, device_type: str, reason: str
) -> None:
    has_nccl = torch.distributed.is_nccl_available()
    way_out = "Call init_process_group" if has_nccl else "torch .* was built without NCCL: install"
    with pytest.raises(ValueError, match=reason.format(way_out)):
        check_backend(found, device_type, "dp")


def test_backends_that_serve_a_device() -> None:
    for found, device_type in (("gloo", "cpu"), ("mpi", "cpu"), ("nccl", "cuda"), ("own", "cuda")):
        check_backend(found, device_type, "dp")


@distributed(2)
def test_a_mesh_of_three_axes_needs_placements() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"needs a 1-D mesh .* got a 3-D mesh"):
        fully_shard(model(), mesh)
    sharded = model()
    fully_shard(sharded, mesh, Placements(("c",), (S,), (S,), (S,)))
    assert sharded.fsdp_parameter_groups[0].mesh.mesh_dim_names == ("c",)


@distributed(2)
def test_axes_out_of_mesh_order() -> None:
    swapped = Placements(("dp_inner", "dp_outer"), (R, S), (A, S), (R, S))
    with pytest.raises(ValueError, match=r"expected mesh order \(dp_outer=1, dp_inner=2\)"):
        fully_shard(model(), mesh_of((1, 2)), swapped)


@distributed(2)
def test_sharding_what_is_sharded_or_owned() -> None:
    sharded, mesh = model(), cpu_mesh()
    fully_shard(sharded, mesh)
    with pytest.raises(ValueError, match="this FsdpSequential is sharded already and has no new"):
        fully_shard(sharded, mesh)
    with pytest.raises(ValueError, match=r"'weight' is already owned .* \(as '0.weight'\)"):
        fully_shard(sharded[0], mesh)
    tied = model()
    tied[1] = nn.Linear(4, 4)
    tied[1].weight = tied[0].weight
    fully_shard(tied[0], mesh)
    with pytest.raises(ValueError, match=r"'1.weight' is already owned .* common parent"):
        fully_shard(tied, mesh)


@distributed(2)
def test_calls_out_of_order() -> None:
    sharded = model()
    with pytest.raises(ValueError, match="nothing at or below this Sequential is sharded"):
        with microbatch(sharded, is_last=True):
            pass
    fully_shard(sharded, cpu_mesh())
    unit = sharded._fsdp_unit
    for first, second in ((Phase.FORWARD, Phase.BACKWARD), (Phase.BACKWARD, Phase.FORWARD)):
        unit.move_to(first)
        with pytest.raises(RuntimeError, match=rf"from {first.value} to {second.value}: a forward"):
            unit.move_to(second)
        assert unit.phase is first
        unit.move_to(Phase.RESTING)
    (group,) = sharded.fsdp_parameter_groups
    with pytest.raises(RuntimeError, match=r"'root': wait_for_unshard .* unshard_parameters first"):
        group.wait_for_unshard()
    with pytest.raises(RuntimeError, match="'root' was released more often than it was unsharded"):
        group.drop()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*not supported with sharded"):
        sharded(torch.randn(2, 4)).sum().backward(create_graph=True)


@distributed(2)
def test_packed_and_padded_are_what_is_asked_for() -> None:
    for layout, sizes in ((ShardLayout.PADDED, 1), (ShardLayout.PACKED, 2)):
        sharded = nn.Linear(4, 5)
        fully_shard(sharded, cpu_mesh(), shard_layout=layout)
        (group,) = sharded.fsdp_parameter_groups
        segments = [group.layout.segment(rank) for rank in range(2)]
        assert len({stop - start for start, stop in segments}) == sizes


@distributed(2)
def test_parameters_that_are_no_dense_plain_tensors() -> None:
    mesh = cpu_mesh()
    weight = torch.ones(4, 4)
    replicated = DTensor.from_local(weight, mesh, [R])
    for value, reason in (
        (nn.UninitializedParameter(), "has no shape yet.*run a forward"),
        (nn.Parameter(replicated), "is a DTensor.*shard the plain module"),
        (nn.Parameter(weight.to_sparse()), "has the layout torch.sparse_coo.*make it dense"),
    ):
        whole = model()
        whole[1].weight = value
        before = dict(whole.named_parameters())
        with pytest.raises(ValueError, match=f"parameter '1.weight' {reason}"):
            fully_shard(whole, mesh)
        assert type(whole) is nn.Sequential
        assert all(each is before[name] for name, each in whole.named_parameters())
    with pytest.raises(TypeError, match="microbatch: module must be a Module, got int"):
        microbatch(3, True).__enter__()  # type: ignore[arg-type]
