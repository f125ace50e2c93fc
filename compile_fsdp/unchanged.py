"""Run a model and leave it as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .torch_internals import is_fake

_OWN_TABLES = ("_parameters", "_modules", "_buffers")


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put back what the calls inside change of ``model``, also after an exception.

    That is: the values of buffers and which tensors they are, plain attributes that were rebound,
    added or deleted (a counter, a cache), ``.grad`` of the parameters, and the random number
    generators of Python and torch. Not put back is what is written *into* an object that is no
    buffer, such as a list.
    """
    restore = [_attributes(module) for module in model.modules()]
    restore += [_buffer_values(model), _gradients(model), _generators(model)]
    try:
        yield
    finally:
        with torch.no_grad():
            for put_back in restore:
                put_back()


def _attributes(module: nn.Module) -> Any:
    plain = {name: value for name, value in module.__dict__.items() if name not in _OWN_TABLES}
    buffers = dict(module._buffers)

    def put_back() -> None:
        for name in [name for name in module.__dict__ if name not in plain]:
            if name not in _OWN_TABLES:
                del module.__dict__[name]
        module.__dict__.update(plain)
        module._buffers.clear()
        module._buffers.update(buffers)

    return put_back


def _buffer_values(model: nn.Module) -> Any:
    # Fake tensors, of a model that is only planned, have no values.
    values = [
        (buffer, buffer.detach().clone()) for buffer in model.buffers() if not is_fake(buffer)
    ]

    def put_back() -> None:
        for buffer, value in values:
            # A write would be seen by a backward that is still to come.
            if not torch.equal(buffer, value):
                buffer.copy_(value)

    return put_back


def _gradients(model: nn.Module) -> Any:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]

    def put_back() -> None:
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient

    return put_back


def _generators(model: nn.Module) -> Any:
    """Of Python and the CPU, and of the accelerators that the model is on."""
    python = random.getstate()
    cpu = torch.get_rng_state()
    devices = {parameter.device for parameter in model.parameters()}
    accelerators = [
        (device, torch.get_device_module(device), torch.get_device_module(device).get_rng_state())
        for device in sorted(devices, key=str)
        if device.type not in ("cpu", "meta")
    ]

    def put_back() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        for device, module, state in accelerators:
            module.set_rng_state(state, device)

    return put_back
