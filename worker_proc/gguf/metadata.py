"""The keys of a GGUF file as typed values, with errors that name file and key."""

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.gguf.model_header import Header

_MAX_SIZE = 2**31 - 1
_MAX_ROWS = 2**24
_LATENT_RANK = "attention.kv_lora_rank"


class Metadata:
    """The keys of an architecture; `ARCHITECTURE.` need not be given."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self._read: set[str] = set()

    def get(self, key: str) -> Any:
        """Return the value of a key of the architecture; None: it is missing."""
        self._read.add(key)
        return self.header.metadata.get(f"{self.header.architecture}.{key}")

    def integer(self, key: str, default: int | None = None, *, min_value: int = 1) -> int:
        """Return a size; one that is stated for each layer must be the same for all of them.

        A 0 is that of layers that have none.
        """
        value = self.get(key)
        if isinstance(value, list) and len(of_layers := set(value) - {0}) == 1:
            [value] = of_layers
        if isinstance(value, list):
            raise self.unsupported(key, "one value for all layers")
        value = default if value is None else value
        if isinstance(value, int) and value is not True and min_value <= value <= _MAX_SIZE:
            return value
        raise self._error(key, value, f"a whole number from {min_value} on")

    def per_layer(self, key: str, count: int) -> list[int]:
        """Return a size for each of the first `count` layers; 0: a layer has none."""
        value = self.get(key)
        values = value if isinstance(value, list) else [value] * count
        if len(values) < count:
            raise self.unsupported(key, f"one value, or one for each of {count} layers")
        for one in values:
            if type(one) is not int or not 0 <= one <= _MAX_SIZE:
                raise self._error(key, value, "whole numbers from 0 on")
        return values[:count]

    def numbers(self, key: str, count: int) -> list[float]:
        """Return a number for each layer."""
        return self._numbers(f"{self.header.architecture}.{key}", self.get(key), count)

    def shared_numbers(self, name: str, count: int) -> list[float]:
        """Return a number for each layer, of a key without the name of the architecture."""
        return self._numbers(name, self.header.metadata.get(name), count)

    def _numbers(self, name: str, value: Any, count: int) -> list[float]:
        is_list = isinstance(value, list) and len(value) == count
        if not is_list or not all(type(one) in (int, float) and one < math.inf for one in value):
            raise CheckpointError(
                f"{self.header.path}: {name} is {_shown(value)}, and must be a number for each of"
                f" {count} layers"
            )
        return [float(one) for one in value]

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number greater than 0."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(key, value, "a number")
        if not 0.0 < value < math.inf:
            raise self._error(key, str(value), "greater than 0 and finite")
        return float(value)

    def number_or_none(self, key: str, default: float | None = None) -> float | None:
        """Return a number greater than 0; None: it is 0, or missing without a default."""
        value = self.get(key)
        if value is None and default is None:
            return None
        if value == 0 and not isinstance(value, bool):
            return None
        return self.number(key, default)

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return value

    def head_size(self) -> int:
        """Return the values of a head, of which keys and values must have as many.

        In multi-head latent attention these are the values of a key.
        """
        if self.get(_LATENT_RANK) is not None:
            return self.latent_size("key_length")
        heads = self.integer("attention.head_count")
        default = self.integer("embedding_length") // heads
        size = self.integer("attention.key_length", max(default, 1))
        if self.integer("attention.value_length", size) != size:
            raise self.unsupported("attention.value_length", f"{size}, as key_length")
        return size

    def latent_size(self, key: str) -> int:
        """Return the values of a key or of a value of multi-head latent attention.

        Files with its matrices in parts state the sizes of latent vectors below the usual keys.
        """
        return self.integer(f"attention.{key}_mla", self.integer(f"attention.{key}"))

    def check_num_rows(self, count: int) -> None:
        """Raise CheckpointError for more rows of a tensor than are listed to put them in order."""
        if count > _MAX_ROWS:
            raise CheckpointError(
                f"{self.header.path}: its keys state a tensor with {count} rows, and at most"
                f" {_MAX_ROWS} are read"
            )

    def check_all_read(self, neutral: Mapping[str, Collection[Any]]) -> None:
        """Raise UnsupportedModel for a key that no code has read and that may change results.

        Keys of `neutral` change nothing with one of their values; no values stand for all.
        """
        prefix = f"{self.header.architecture}."
        for name in self.header.metadata:
            key = name.removeprefix(prefix)
            if key == name or key in self._read:
                continue
            if key not in neutral:
                raise UnsupportedModel(
                    f"{self.header.path} has the key {name[:100]}, which is not supported"
                )
            if neutral[key] and self.get(key) not in neutral[key]:
                known = " or ".join(_shown(value) for value in neutral[key])
                raise self.unsupported(key, known)

    def rotated_share(self, size: int) -> float:
        """Return which part of a head of `size` values is rotated.

        transformers rounds `size` times this number down, so the result is the stated count.
        """
        key = "rope.dimension_count"
        count = self.integer(key, size)
        if count > size or count % 2:
            raise self.unsupported(key, f"an even number of at most {size}, the values of a head")
        share = count / size
        return share if int(size * share) == count else math.nextafter(share, 1.0)

    def unsupported(self, key: str, supported: str) -> UnsupportedModel:
        """Return the error for a value that is not supported."""
        name = f"{self.header.architecture}.{key}"
        return UnsupportedModel(
            f"{self.header.path}: {name} is {_shown(self.get(key))}; supported: {supported}"
        )

    def _error(self, key: str, value: Any, expected: str) -> CheckpointError:
        name = f"{self.header.architecture}.{key}"
        if value is None:
            return CheckpointError(f"{self.header.path} misses the key {name}")
        return CheckpointError(
            f"{self.header.path}: {name} is {_shown(value)}, and must be {expected}"
        )


def _shown(value: object) -> str:
    return json.dumps(value)[:100]
