"""Products of matrices in MXFP8 by the device, where it has them: nothing is dequantised before.

The device wants the scales of 128 rows and 4 blocks together, as cuBLAS lays them out ("block
scaling factors layout" in its documentation)::

    128 rows x 4 scales  ->  32 x 16 bytes:  row r, scale s  at  (r % 32, 4 * (r // 32) + s)

and such tiles one behind the other, those of the same rows first.

No device that has this has run it yet: it is asked for by a policy, and tested with a stand-in.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .mxfp8 import BLOCK, DATA_DTYPE, SCALE_DTYPE, quantize

__all__ = ["obstacle_to_scaled_matmul", "scaled_matmul", "swizzled"]

Planes = tuple[torch.Tensor, torch.Tensor]

_CAPABILITY = (10, 0)
_TILE_ROWS, _TILE_SCALES = 128, 4


def obstacle_to_scaled_matmul(device: torch.device) -> str | None:
    """Why ``device`` cannot multiply matrices in MXFP8; None: it can."""
    # Before, Dynamo does not trace the function.
    if torch.__version__ < "2.13":
        return f"needs torch 2.13, found {torch.__version__}"
    if device.type != "cuda":
        return f"needs a CUDA device, found {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found < _CAPABILITY:
        name, wanted = torch.cuda.get_device_name(device), ".".join(map(str, _CAPABILITY))
        return f"needs compute capability {wanted}, found {'.'.join(map(str, found))} ({name})"
    return None


def scaled_matmul(rows: torch.Tensor, planes: Planes, dtype: torch.dtype) -> torch.Tensor:
    """``rows @ matrix.T``, with ``rows`` quantised here.

    Args:
        rows: ``(m, k)``, of fp32, bf16 or fp16; ``k`` is a multiple of 32.
        planes: data ``(n, k)`` and scales ``(n, k / 32)`` of the matrix, bytes.
        dtype: of the result, ``(m, n)``.
    """
    # Whole blocks of rows: `quantize` asks for no less, and they are cut off again.
    count = rows.shape[0]
    data, scales = quantize(F.pad(rows, (0, 0, 0, -count % BLOCK)))
    recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    product: torch.Tensor = F.scaled_mm(
        data,
        planes[0].view(DATA_DTYPE).t(),
        swizzled(scales),
        recipe,
        swizzled(planes[1]),
        recipe,
        swizzle,
        swizzle,
        output_dtype=dtype,
    )
    return product.narrow(0, 0, count)


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Scales ``(rows, blocks)``, bytes, as the device wants them: 1-D ``float8_e8m0fnu``, with
    zeros where a tile is not full."""
    rows, blocks = scales.shape
    padded = F.pad(scales, (0, -blocks % _TILE_SCALES, 0, -rows % _TILE_ROWS))
    # By tile: which quarter of its rows, row in the quarter, scale.
    tiles = padded.view(padded.shape[0] // _TILE_ROWS, 4, 32, -1, _TILE_SCALES)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().flatten().view(SCALE_DTYPE)
