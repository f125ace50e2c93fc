"""An explanation as JSON, and back.

The schema, version 1. An object has the fields of the class of this name in
`compile_fsdp.explanation`, under their names and with the meanings given there; tuples are arrays,
None is null, sizes are bytes::

    {
      "format": "compile_fsdp.explanation",
      "version": 1,
      "torch_version": str, "world_size": int, "notes": [str],
      "groups": [ParameterGroup],
      "graphs": [GraphExplanation with "steps": [PlannedStep], "spans": [Span],
                 "collectives": [CollectiveTotal], "memory": [MemoryPoint]],
      "breaks": [GraphBreak],
      "recompiles": [Recompile],
      "formats": [WeightFormat]
    }

The version changes when a field goes away or changes its meaning; readers must accept fields that
they do not know.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from compile_fsdp.explanation import SCHEMA_VERSION, Explanation

FORMAT = "compile_fsdp.explanation"


def as_data(explanation: Explanation) -> dict[str, Any]:
    """The schema's object, of dicts, lists and scalars."""
    return {"format": FORMAT, "version": SCHEMA_VERSION, **asdict(explanation)}


def dumps(explanation: Explanation) -> str:
    """See `Explanation.to_json`."""
    return json.dumps(as_data(explanation), indent=1)


def loads(text: str) -> Explanation:
    """See `Explanation.from_json`."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not an explanation: the text is not JSON ({error})") from error
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ValueError(f"not an explanation: expected a JSON object of format {FORMAT!r}")
    if data.get("version") != SCHEMA_VERSION:
        raise ValueError(
            f"this explanation has version {data.get('version')!r} of the schema, expected "
            f"{SCHEMA_VERSION}: it was written by another release of compile_fsdp"
        )
    explanation = _build(Explanation, data, "explanation")
    assert isinstance(explanation, Explanation)
    return explanation


def _build(kind: Any, value: Any, where: str) -> Any:
    """``value`` as an instance of the annotated type ``kind``."""
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, got {value!r}")
        hints = get_type_hints(kind)
        given = {
            field.name: _build(hints[field.name], value[field.name], f"{where}.{field.name}")
            for field in fields(kind)
            if field.name in value
        }
        try:
            return kind(**given)  # type: ignore[operator]
        except TypeError as error:
            raise ValueError(f"{where} lacks a field: {error}") from error
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be an array, got {value!r}")
        return tuple(_build(get_args(kind)[0], each, f"{where}[]") for each in value)
    if get_origin(kind) is types.UnionType:
        if value is None:
            return None
        return _build(get_args(kind)[0], value, where)
    if kind is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} must be {kind.__name__}, got {value!r}")
    return value
