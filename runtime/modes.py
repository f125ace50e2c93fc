"""The mode in which the runtime writes its buffers: without autograd, outside inference mode.

Callers are in whatever mode the user is in. A tensor that is born in inference mode could never be
written again in training, and the runtime keeps what it allocates. A caller may also be inside of
an operator, below autograd, where writes are not counted and no view knows its base; leaving
inference mode, which is for tensors that do without these, brings them back.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from .torch_internals import is_below_autograd

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOTHING = nullcontext()


def without_autograd() -> AbstractContextManager[None]:
    """A context without autograd and outside inference mode.

    The runtime's functions call each other in it, so that it is mostly entered where it holds
    already: then it costs two questions.
    """
    if is_below_autograd():  # as inference mode is
        return _outside_inference_mode()
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield
