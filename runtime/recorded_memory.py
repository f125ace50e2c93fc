"""What memory operators touch, and when memory comes and goes, for a `Recorder`.

`Operators` is a dispatch mode: it reads in each operator's schema what it writes, and notes the
addresses of what it is given and of what it returns. `Storages` knows which are live. A new
storage is an allocation on the stream that is current then; it is freed when the last tensor over
it dies. The storages that the runtime resizes are looked at before anything is recorded.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from . import ops
from .happens_before import Access, Allocate, Entry, Free, Span
from .torch_internals import (
    OpOverload,
    TorchDispatchMode,
    argument_names,
    is_fake_tensor_class,
    written_arguments,
)

if TYPE_CHECKING:
    from .recording import Recorder

__all__ = ["HELPERS", "NO_HELPERS", "Operators", "Storages", "place"]

# Of these only the shape, dtype and device of the arguments matter ...
_LIKE = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty "
    "new_empty_strided new_zeros new_ones new_full".split()
)
# These ask something about a tensor, not about its values ...
_QUESTIONS = frozenset("is_pinned _is_pinned is_same_size size stride numel dim".split())
# ... and these leave their result as it was.
_EMPTY = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split()
)


class Operators(TorchDispatchMode):
    """Notes what every operator touches while it is active."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Otherwise Dynamo passes every compiled frame by, for good."""
        return True

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(is_fake_tensor_class(kind) for kind in types):
            return func(*args, **kwargs)  # somebody asks for shapes: nothing runs
        if any(kind is not torch.Tensor for kind in types):
            # A DTensor: it calls operators on what it is made of.
            return NotImplemented
        if func.namespace == ops.NAMESPACE:
            with self:
                return ops.kernels[_name(func)](*args, **kwargs)
        if self._recorder.is_paused:
            return func(*args, **kwargs)
        self._recorder.memory.look()
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        recorder, memory = self._recorder, self._recorder.memory
        given = {**dict(zip(argument_names(func), args, strict=False)), **kwargs}
        inputs = {name: list(_tensors(value)) for name, value in given.items()}
        held = {id(each.untyped_storage()) for tensors in inputs.values() for each in tensors}
        results = [each for each in _tensors(result) if not _is_wrapper(each)]
        fresh = [each for each in results if id(each.untyped_storage()) not in held]
        written: Iterable[str] = written_arguments(func)
        if func.namespace == "c10d":  # schemas of collectives say nothing
            written = inputs
        if results and not fresh and not written:
            return  # a view
        name = _name(func)
        reads = (
            []
            if name in _LIKE | _QUESTIONS
            else [each for tensors in inputs.values() for each in tensors]
        )
        writes = [each for key in written for each in inputs.get(key, ())]
        read, changed = memory.spans(reads), memory.spans(writes)
        made = memory.spans(fresh, new=True)
        if name not in _EMPTY:
            changed += made
        if read or changed:
            recorder.note(Access(recorder.entries, str(func), place(), read, changed))


class Storages:
    """The storages that are live, as blocks with numbers."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # By the identity of the storage's object, which lives as long as the storage.
        self._live: dict[int, weakref.finalize[..., Any]] = {}
        self._blocks: dict[int, tuple[int | None, Span]] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._owners: dict[int, tuple[Entry, ...]] = {}
        self._count = 0

    def spans(self, tensors: Iterable[torch.Tensor], *, new: bool = False) -> tuple[Span, ...]:
        """The addresses of ``tensors``, whose storages are noted if nobody has seen them yet;
        ``new``: an operator has just made them."""
        found = []
        for tensor in tensors:
            if tensor.is_meta or tensor.layout != torch.strided or _is_wrapper(tensor):
                continue
            storage = tensor.untyped_storage()
            if id(storage) not in self._blocks:
                self._see(storage, new)
            if tensor.numel():
                found.append(_span_of(tensor))
        return tuple(found)

    def watch(self, tensor: torch.Tensor, stream: str) -> None:
        """``tensor`` is on ``stream``'s memory, and its storage may lose it and get it again."""
        storage = tensor.untyped_storage()
        self._watched[id(storage)] = weakref.ref(storage)
        self._keep(storage)
        if storage.nbytes():
            self._allocated(storage, (Entry(stream, "watch", ""),), new=False)

    def look(self) -> None:
        """Notice which of the watched storages were resized."""
        for key, reference in self._watched.items():
            storage = reference()
            if storage is None:
                continue
            number, span = self._blocks[key]
            if span != Span(storage.data_ptr(), storage.data_ptr() + storage.nbytes()):
                if number is not None:
                    self._recorder.note(Free(number, place()))
                self._blocks[key] = (None, Span(0, 0))
                if storage.nbytes():
                    self._allocated(storage, self._recorder.entries, new=True)

    def forget(self) -> None:
        """Watch nothing any more."""
        for finalizer in self._live.values():
            finalizer.detach()
        self._live.clear()
        self._watched.clear()

    def _see(self, storage: torch.UntypedStorage, new: bool) -> None:
        span = Span(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        self._keep(storage)
        aliases = any(
            each.start < span.stop and span.start < each.stop for _, each in self._blocks.values()
        )
        if aliases or span.start >= span.stop:
            return
        if new:
            self._allocated(storage, self._recorder.entries, new=True)
        else:
            self._allocated(storage, (), new=False)

    def _keep(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        self._blocks[key] = (None, Span(0, 0))
        self._live[key] = weakref.finalize(storage, self._died, key)
        self._live[key].atexit = False

    def _allocated(
        self, storage: torch.UntypedStorage, entries: tuple[Entry, ...], *, new: bool
    ) -> None:
        self._count += 1
        span = Span(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        self._blocks[id(storage)] = (self._count, span)
        self._recorder.note(Allocate(entries, self._count, span, place(HELPERS), new))

    def _died(self, key: int) -> None:
        del self._live[key]
        number, _ = self._blocks.pop(key)
        self._watched.pop(key, None)
        if number is not None:
            self._recorder.note(Free(number, place()))


def _span_of(tensor: torch.Tensor) -> Span:
    """From the first to the last byte; what lies between strides counts."""
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))  # noqa: B905
    return Span(start, start + (last + 1) * tensor.element_size())


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether operators on ``tensor`` are others on what it is made of."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


@functools.cache
def _name(func: OpOverload) -> str:
    return str(func).split(".")[1]


_TORCH = str(Path(torch.__file__).parent)
_OURS = frozenset(("recording.py", "recorded_memory.py", "streams.py"))
HELPERS = frozenset(("dbuffer.py", "memory.py"))
"""Files that get memory for others."""
NO_HELPERS: frozenset[str] = frozenset()


def place(helpers: frozenset[str] = NO_HELPERS) -> str:
    """File, line and function of who called, as ``"runtime/weights.py:136 release"``.

    Files of torch, of the recording and ``helpers`` of this folder are looked through.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = _shown(frame.f_code, helpers)
        if name is not None:
            return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


@functools.cache
def _shown(code: CodeType, helpers: frozenset[str]) -> str | None:
    path = Path(code.co_filename)
    if code.co_filename.startswith(_TORCH) or path.name in ("contextlib.py", "weakref.py"):
        return None
    if path.parent == Path(__file__).parent and path.name in _OURS | helpers:
        return None
    return "/".join(path.parts[-2:])
