"""compile_fsdp: fully sharded data parallel training whose communication is compiled.

Shard a model with `fully_shard`, compile it with ``torch.compile(model, backend="compile_fsdp")``
and train as usual; without ``torch.compile`` the same runtime is driven by module hooks.
"""

import compile_fsdp.runtime.ops  # noqa: F401  (registers torch.ops.compile_fsdp)

from .checkpoint import PendingSave, async_save_checkpoint, load_checkpoint, save_checkpoint
from .checkpoint_export import export_safetensors
from .checkpoint_import import import_safetensors
from .explain import Capture, capture, explain
from .explanation import Explanation
from .fully_shard import fully_shard, microbatch, zero_missing_gradients
from .graphed import GraphRuns, graph_runs, release_graphs
from .module import FsdpModule, register_forward_method
from .optimizer import fully_shard_optimizer
from .runtime.dbuffer import DBuffer
from .runtime.mixed_precision import MixedPrecisionPolicy
from .runtime.placement import (
    BlockAtomic,
    Flat,
    Placements,
    RowAtomic,
    ShardLayout,
    TensorAtomic,
)

__version__ = "0.1.0"

__all__ = [
    "BlockAtomic",
    "Capture",
    "DBuffer",
    "Explanation",
    "Flat",
    "FsdpModule",
    "GraphRuns",
    "MixedPrecisionPolicy",
    "PendingSave",
    "Placements",
    "RowAtomic",
    "ShardLayout",
    "TensorAtomic",
    "async_save_checkpoint",
    "capture",
    "explain",
    "export_safetensors",
    "fully_shard",
    "fully_shard_optimizer",
    "graph_runs",
    "import_safetensors",
    "load_checkpoint",
    "microbatch",
    "register_forward_method",
    "release_graphs",
    "save_checkpoint",
    "zero_missing_gradients",
]
