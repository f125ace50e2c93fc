"""What fully_shard does to a module, what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy
import gc
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import compile_fsdp.runtime.parameter_group as parameter_group
from compile_fsdp import (
    FsdpModule,
    MixedPrecisionPolicy,
    Placements,
    TensorAtomic,
    fully_shard,
    fully_shard_optimizer,
)
from compile_fsdp.backend import CompileOptions
from compile_fsdp.runtime.recording import recorded_step
from tests.distributed import distributed
from tests.models import LanguageModel, language_batches
from tests.training import assert_gradients_close, cpu_mesh, drive, full, local_batch, shard_blocks


@pytest.mark.compat
@distributed(2)
def test_at_rest_parameters_are_sharded_dtensors_under_unchanged_names() -> None:
    model = LanguageModel()
    names = [name for name, _ in model.named_parameters()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    shard_blocks(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == list(values)
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor)
        torch.testing.assert_close(full(value), values[name], rtol=0, atol=0)
    assert isinstance(model, FsdpModule) and isinstance(model, LanguageModel)
    assert isinstance(model.head.weight, DTensor)


@distributed(2)
def test_two_wraps_of_one_class_do_not_see_each_other() -> None:
    """State is on instances: same classes, other meshes, other values."""
    one, two = LanguageModel(), LanguageModel()
    values = [each.head.weight.detach().clone() for each in (one, two)]
    shard_blocks(one)
    shard_blocks(two, init_device_mesh("cpu", (2,), mesh_dim_names=("other",)))
    assert type(one) is type(two) and type(one.head) is type(two.head)
    for each, value in zip((one, two), values, strict=True):
        torch.testing.assert_close(full(each.head.weight), value, rtol=0, atol=0)
    batch = local_batch(language_batches(1, 2)[0])
    one(*batch).backward()
    assert all(parameter.grad is None for parameter in two.parameters())


@distributed(2)
def test_sharding_twice_is_refused() -> None:
    model = shard_blocks(LanguageModel())
    with pytest.raises(ValueError, match="sharded already"):
        fully_shard(model, cpu_mesh())
    with pytest.raises(ValueError, match="sharded already"):
        fully_shard(model.blocks[0], cpu_mesh())
    with pytest.raises(ValueError, match=r"'weight' is already owned .* at 'blocks\.0'"):
        fully_shard(model.blocks[0].up, cpu_mesh())


@distributed(2)
def test_wrong_arguments_are_refused_and_change_nothing() -> None:
    model = nn.Linear(4, 4)
    mesh = cpu_mesh()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="no parameters and no sharded modules below it"):
        fully_shard(nn.ReLU(), mesh)
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got str"):
        fully_shard(model, "cpu")
    with pytest.raises(TypeError, match="module must be a Module, got int"):
        fully_shard(3, mesh)
    with pytest.raises(ValueError, match="use_symm_mem=True: it is memory of CUDA devices"):
        fully_shard(model, mesh, use_symm_mem=True)
    atomic = Placements(("dp",), *[(TensorAtomic(),)] * 3)
    with pytest.raises(ValueError, match="'weight' has no owner; pass parameter_to_owner"):
        fully_shard(model, mesh, atomic)
    with pytest.raises(TypeError, match="main_params_dtype must be None or a floating-point"):
        MixedPrecisionPolicy(main_params_dtype=torch.int32)
    assert dict(model.named_parameters()) == before
    assert type(model) is nn.Linear and not model._forward_pre_hooks


@distributed(2)
def test_a_mesh_of_another_device_type_is_refused_by_parameter() -> None:
    class CudaMesh:  # a CUDA mesh cannot be made here; only its device type is looked at
        device_type = "cuda"

    from compile_fsdp.argument_checks import check_devices

    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"'weight' is on cpu but the mesh is for 'cuda'") as error:
        check_devices(dict(model.named_parameters()), CudaMesh())
    assert "module.to('cuda')" in str(error.value)


@distributed(2)
def test_a_failure_half_way_leaves_the_module_as_it_was() -> None:
    """The second group's construction fails after the first one has taken its parameters over."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16))
    before = {name: (each, each.data.clone()) for name, each in model.named_parameters()}
    original = parameter_group.FsdpParameterGroup._create_gradient
    calls = []

    class Failing(parameter_group.FsdpParameterGroup):
        def _create_gradient(self, *args: object) -> object:
            calls.append(self.dtype)
            if len(calls) == 2:
                raise MemoryError("no room")
            return original(self, *args)

    # By name: the package's attribute of this name is the function.
    module_under_test = sys.modules["compile_fsdp.fully_shard"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_under_test, "FsdpParameterGroup", Failing)
        with pytest.raises(MemoryError):
            fully_shard(model, cpu_mesh())
    assert calls == [torch.float32, torch.bfloat16]
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert not parameter.__dict__
    fully_shard(model, cpu_mesh())
    assert isinstance(model, FsdpModule)


@distributed(2)
def test_a_root_whose_parameters_all_belong_to_children_is_legal() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for child in model:
        fully_shard(child, cpu_mesh())
    fully_shard(model, cpu_mesh())
    assert model.fsdp_parameter_groups == ()
    model(torch.randn(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@distributed(2)
def test_conversions_after_sharding_are_refused_or_keep_the_shards() -> None:
    model = shard_blocks(LanguageModel())
    value = full(model.head.weight)
    model.to("cpu")
    model.to_empty(device="cpu")
    torch.testing.assert_close(full(model.head.weight), value, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="convert the module before sharding"):
        model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"assign=True.*assign=False"):
        model.load_state_dict(model.state_dict(), assign=True)


@distributed(2)
def test_state_dicts_of_full_and_of_sharded_values_load() -> None:
    source = LanguageModel()
    targets = [shard_blocks(LanguageModel()), shard_blocks(LanguageModel())]
    targets[0].load_state_dict(source.state_dict())
    targets[1].load_state_dict(targets[0].state_dict())
    for target in targets:
        for name, value in source.state_dict().items():
            torch.testing.assert_close(full(target.state_dict()[name]), value, rtol=0, atol=0)
    wrong = {**source.state_dict(), "head.weight": torch.zeros(3, 3)}
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
        targets[0].load_state_dict(wrong)


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
@distributed(2)
def test_meta_init_then_load(driver: str) -> None:
    source = LanguageModel(tied=True).to(torch.bfloat16)
    with torch.device("meta"):
        model = LanguageModel(tied=True).to(torch.bfloat16)
    model.head.weight.is_special = True
    shard_blocks(model)
    assert all(not parameter.is_meta for parameter in model.parameters())
    assert model.head.weight.is_special
    model.load_state_dict(source.state_dict())
    assert model.head._parameters["weight"] is model.embedding._parameters["weight"]
    batch = local_batch(language_batches(1, 2)[0])
    loss = drive(model, driver)(*batch)
    torch.testing.assert_close(loss, source(*batch), rtol=0, atol=0)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@distributed(2)
def test_optimizer_hooks_cast_restore_and_refresh() -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    fully_shard(model, cpu_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fully_shard_optimizer(optimizer)
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(parameter.grad.dtype for parameter in model.parameters())
    )
    model(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert seen == [torch.float32, torch.float32]
    assert all(parameter.grad.dtype is torch.bfloat16 for parameter in model.parameters())
    (group,) = model.fsdp_parameter_groups
    for index in range(2):
        expected = group.main_weight.get_local_tensor(index).to(torch.bfloat16)
        found = group.model_weight.get_local_tensor(index)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match="without a closure"):
        optimizer.step(lambda: None)
    with pytest.raises(ValueError, match="already"):
        fully_shard_optimizer(optimizer)
    with pytest.raises(ValueError, match="no parameter of this SGD is sharded"):
        fully_shard_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1))


@distributed(2)
def test_an_optimizer_from_before_is_refused() -> None:
    """It would step parameters that nobody reads: between two calls, those of the second one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = torch.optim.SGD(model.parameters(), lr=0.5)
    fully_shard(model[0], cpu_mesh())
    between = torch.optim.SGD(model.parameters(), lr=0.5)
    fully_shard(model, cpu_mesh())
    for optimizer, name in ((before, "weight"), (between, "1.weight")):
        with pytest.raises(ValueError, match=f"before fully_shard: .*parameter '{name}'"):
            fully_shard_optimizer(optimizer)
    fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))


@distributed(2)
def test_model_weights_are_refreshed_without_prepared_optimizer_too() -> None:
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    fully_shard(model, cpu_mesh(), mixed_precision_policy=policy)
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    weight = full(next(model.parameters())).to(torch.bfloat16)
    torch.testing.assert_close(model(x), x @ weight.t(), rtol=0, atol=0)


def test_options_are_checked_by_name() -> None:
    with pytest.raises(ValueError, match="unknown option 'iner'; did you mean 'inner'"):
        CompileOptions.parse({"iner": "inductor"})
    with pytest.raises(ValueError, match="'inner' must be one of inductor, aot_eager, got 'x'"):
        CompileOptions.parse({"inner": "x"})
    with pytest.raises(TypeError, match="'verify' must be a bool"):
        CompileOptions.parse({"verify": "yes"})
    for prefetch in (-1, True, 1.5, "far"):
        with pytest.raises(ValueError, match="'prefetch': expected 'auto' or a number of groups"):
            CompileOptions.parse({"prefetch": prefetch})
    assert CompileOptions.parse(None) == CompileOptions()


@distributed(1)
def test_unknown_options_reach_the_user_through_torch_compile() -> None:
    model = nn.Linear(2, 2)
    fully_shard(model, cpu_mesh())
    call = torch.compile(model, backend="compile_fsdp", options={"colour": "red"})
    with pytest.raises(Exception, match="unknown option 'colour'"):
        call(torch.randn(1, 2))


@distributed(2)
def test_an_exception_in_forward_leaves_nothing_behind() -> None:
    model = shard_blocks(LanguageModel())
    reference = copy.deepcopy([full(parameter) for parameter in model.parameters()])
    tokens, targets = local_batch(language_batches(1, 2)[0])
    with pytest.raises(ValueError, match="batch_size"):
        model(tokens, targets[:, :2])
    model(tokens, targets).backward()
    assert model._fsdp_unit.context.eager_depth == 0
    assert isinstance(model.head.weight, DTensor)
    assert not any(group.is_unsharded for group in model._fsdp_unit.context.groups())
    for parameter, value in zip(model.parameters(), reference, strict=True):
        torch.testing.assert_close(full(parameter), value, rtol=0, atol=0)
        assert parameter.grad is not None


class FailingBackward(torch.autograd.Function):
    """Identity that raises in backward while ``armed``."""

    armed = False

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        if FailingBackward.armed:
            raise ArithmeticError("in backward")
        return gradient


class FailsInTheMiddle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(FailingBackward.apply(self.first(x))).sum()


@distributed(2)
def test_an_exception_in_backward_then_a_retry_counts_no_gradient_twice() -> None:
    """The second layer's gradient was there when the backward was interrupted."""
    model = FailsInTheMiddle()
    reference = copy.deepcopy(model)
    fully_shard(model, cpu_mesh())
    x = torch.randn(3, 4)
    FailingBackward.armed = True
    with pytest.raises(ArithmeticError):
        model(x).backward()
    FailingBackward.armed = False
    model.zero_grad()
    model(x).backward()
    reference(x).backward()
    assert_gradients_close(model, reference)


@distributed(2)
def test_a_deleted_model_is_freed_groups_and_all() -> None:
    model = shard_blocks(LanguageModel())
    model(*local_batch(language_batches(1, 2)[0])).backward()
    groups = [weakref.ref(group) for group in model._fsdp_unit.context.groups()]
    del model
    gc.collect()
    assert all(group() is None for group in groups)


@distributed(2)
def test_weights_in_flight_are_waited_for_before_their_memory_goes() -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, cpu_mesh())
    (group,) = model.fsdp_parameter_groups
    with recorded_step(model) as recorder:
        group.unshard_parameters()
        group.reshard_parameters()
    assert [str(record) for record in recorder.log][-4:] == [
        "compute: waits for event 2",
        "compute: event 3",
        "gather: waits for event 3",
        "frees block 1",
    ]
    with pytest.raises(RuntimeError, match=r"wait_for_unshard was called while .* sharded"):
        group.wait_for_unshard()
    with pytest.raises(RuntimeError, match="released more often than it was unsharded"):
        group.drop()


@distributed(2)
def test_the_next_unit_is_gathered_while_one_computes() -> None:
    model = shard_blocks(LanguageModel(blocks=3))
    groups = [block.fsdp_parameter_groups[0] for block in model.blocks]
    seen = []
    model.blocks[0].norm.register_forward_hook(
        lambda *_: seen.append([group.is_unsharded for group in groups])
    )
    model(*local_batch(language_batches(1, 2)[0]))
    assert seen == [[True, True, False]]
