"""An open GGUF file: typed metadata, and tensors that are dequantized one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from everystop.errors import ServiceError, invalid

_Value = TypeVar("_Value", str, int, float, bool)


class GgufFile:
    """Reads one GGUF file. Every error is a ServiceError INVALID_ARGUMENT that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:  # how the reader meets bytes that it did not expect
            raise self.error(f"not a whole GGUF file ({error})") from error
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self.get("general.architecture", str)
        if self.get("split.count", int, 1) > 1:
            raise self.error("one part of several; join them first (llama-gguf-split --merge)")

    def error(self, why: str) -> ServiceError:
        """The refusal of this file, to be raised."""
        return invalid("model", f"{self.path.name}: {why}")

    def get(self, key: str, kind: type[_Value], default: _Value | None = None) -> _Value:
        """The metadata value of `key`, which the file must have unless there is a default."""
        field = self._fields.get(key)
        if field is None:
            if default is None:
                raise self.error(f"has no {key}")
            return default
        value = field.contents()
        if not isinstance(value, kind):
            raise self.error(f"{key} must be of type {kind.__name__}, not {type(value).__name__}")
        return value

    def get_list(self, key: str, kind: type[_Value]) -> list[_Value]:
        """The metadata array of `key`; empty when the file has none."""
        field = self._fields.get(key)
        values = [] if field is None else field.contents()
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise self.error(f"{key} must be a list of {kind.__name__}")
        return values

    def has(self, key: str) -> bool:
        """Whether the metadata has `key`."""
        return key in self._fields

    @property
    def tensor_types(self) -> dict[str, GGMLQuantizationType]:
        """How each tensor is stored, by name, in the file's order."""
        return {name: tensor.tensor_type for name, tensor in self._tensors.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Outermost dimension first, (rows, columns) for a matrix; GGUF itself counts from the innermost."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor's values, dequantized, of shape `shape(name)`; a view of the file where it holds float32."""
        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise self.error(f"tensor {name} is of type {tensor.tensor_type.name}, which can't be read") from error
        return values.reshape(self.shape(name))
