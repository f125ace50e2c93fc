"""Every private torch name that the user-facing layer touches, with the reason.

The runtime and the passes each have a file of this name for what they lean on, since imports
point downwards only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def exclude_gathered_buffers_from_reuse() -> None:
    """Tell Inductor never to give the memory of a gathered buffer to another tensor.

    Inductor takes the result of an opaque op for a fresh allocation that is free for reuse after
    its last read. The buffer behind ``unshard`` belongs to the runtime, which takes its memory
    away at ``release``; a tensor placed there would write to freed memory. Inductor keeps a list
    of buffers to leave alone (it uses it for resized storages), and only a lowering can add to it.
    Idempotent.
    """
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V

    op = torch.ops.compile_fsdp.unshard.default
    call = fallback_handler(op)

    def lower(*args: Any) -> Any:
        full = call(*args)
        V.graph.never_reuse_buffers.add(full.get_name())
        return full

    register_lowering(op, type_promotion_kind=None)(lower)
