"""Which dtype each buffer of a parameter group has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of main weights, main gradients and gradient communication.

    The compute dtype is not here: it is the dtype the module's parameters have when
    ``fully_shard`` is called (``model.to(torch.bfloat16)`` before sharding trains in bf16 with
    fp32 main weights under the default policy).

    Args:
        main_params_dtype: dtype of the copy the optimizer updates. None means fp32. It is
            never narrower than the parameter itself (fp64 parameters keep fp64 main weights),
            and parameters that are not floating point keep their own dtype.
        main_grads_dtype: dtype gradients accumulate in; None means the parameter's own dtype.
        grad_comm_dtype: dtype gradients are reduced in; None means ``main_grads_dtype``.
        compute_weights: ``"mxfp8"``: the weights of linear layers whose dims are multiples of 32
            compute in MXFP8, and are gathered at half the bytes of bf16; other parameters stay as
            they are. A mapping says which, by patterns of their names below the module that is
            sharded: ``{"*.gate.weight": None, "mlp.*.weight": "mxfp8"}``. The first pattern that
            fits counts; what is named must be such a weight. None: no parameter does.
        scaled_matmul: let the device multiply numbers in MXFP8 with those that ``compute_weights``
            is about; activations, and their gradients, are quantised as well. Otherwise weights
            are dequantised, and products computed in the dtype of the activations.

    Raises:
        TypeError: a dtype is neither None nor a floating-point ``torch.dtype``;
            ``compute_weights`` is neither None, a string nor a mapping from strings.
        ValueError: a value of ``compute_weights`` is neither None nor ``"mxfp8"``, or
            ``scaled_matmul`` is asked for without it.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    compute_weights: str | Mapping[str, str | None] | None = field(default=None, hash=False)
    scaled_matmul: bool = False

    def __post_init__(self) -> None:
        for name in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, torch.dtype) or not value.is_floating_point:
                raise TypeError(
                    f"MixedPrecisionPolicy.{name} must be None or a floating-point torch.dtype, "
                    f"got {value!r}"
                )

        self._check_compute_weights()

    def _check_compute_weights(self) -> None:
        asked = self.compute_weights
        if not (asked is None or isinstance(asked, str | Mapping)):
            raise TypeError(
                'MixedPrecisionPolicy.compute_weights must be None, "mxfp8" or a mapping of '
                f"patterns to these, got {asked!r}"
            )
        for pattern in asked if isinstance(asked, Mapping) else ():
            if not isinstance(pattern, str):
                raise TypeError(
                    "MixedPrecisionPolicy.compute_weights: expected patterns of parameter names, "
                    f"got {pattern!r} as one; use the names below the module that is sharded"
                )
        for value in asked.values() if isinstance(asked, Mapping) else (asked,):
            if value not in (None, "mxfp8"):
                raise ValueError(
                    f'MixedPrecisionPolicy.compute_weights: expected None or "mxfp8", got {value!r}'
                )
        if self.scaled_matmul and asked is None:
            raise ValueError(
                'MixedPrecisionPolicy: scaled_matmul=True needs compute_weights="mxfp8", for it '
                "multiplies weights in that format"
            )

    def of_group(self, *, quantized: bool) -> MixedPrecisionPolicy:
        """This policy for a group whose parameters are all ``quantized``, or none of them."""
        if quantized:
            return replace(self, compute_weights="mxfp8")
        return replace(self, compute_weights=None, scaled_matmul=False)

    def resolve(self, parameter_dtype: torch.dtype) -> ResolvedPrecision:
        """The dtypes of a group whose parameters have ``parameter_dtype``."""
        if not parameter_dtype.is_floating_point:
            return ResolvedPrecision(parameter_dtype, parameter_dtype, parameter_dtype)
        main = torch.promote_types(self.main_params_dtype or torch.float32, parameter_dtype)
        grads = self.main_grads_dtype or parameter_dtype
        return ResolvedPrecision(main, grads, self.grad_comm_dtype or grads)


@dataclass(frozen=True)
class ResolvedPrecision:
    """A policy applied to one parameter dtype: no None is left."""

    main_params_dtype: torch.dtype
    main_grads_dtype: torch.dtype
    grad_comm_dtype: torch.dtype

    def frozen(self, dtype: torch.dtype) -> ResolvedPrecision:
        """The dtypes of a group that nothing updates: the main weight is the model weight."""
        return replace(self, main_params_dtype=dtype)

    def smallest_itemsize(self, dtype: torch.dtype) -> int:
        """Bytes of an element of the narrowest buffer, the compute weights' ``dtype`` included."""
        dtypes = (dtype, self.main_params_dtype, self.main_grads_dtype, self.grad_comm_dtype)
        return min(each.itemsize for each in dtypes)
