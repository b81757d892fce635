"""Reads a whole PEFT adapter for a model, or raises an error that names the file and the key."""

import ctypes
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, NamedTuple

import msgspec
import torch
from msgspec import Meta

from protocol.adapters import (
    WEIGHTS_FILE,
    Adapter,
    AdapterError,
    digest_of,
    open_weights,
    read_config_bytes,
)
from protocol.config.peft_config import PeftConfig, read_config
from worker_proc.adapters.matrices import LoadedAdapter, Matrix, Product
from worker_proc.adapters.sites import Sites
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.structures import StoredType

_PREFIX = "base_model.model."
_PART = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_LENGTH_BYTES = 8
_HEADER_BYTES = 2**24
_CHUNK_BYTES = 2**20
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_NAMES = 5


class _StoredTensor(msgspec.Struct):
    """An entry in the header of a safetensors file."""

    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=8)]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


class _Pair(NamedTuple):
    """The two matrices of a linear layer."""

    down: Matrix
    up: Matrix


class AdapterReader:
    """Reads adapters for one model."""

    def __init__(
        self, library: NativeLibrary, dtype: torch.dtype, sites: Sites, max_rank: int
    ) -> None:
        self._library = library
        self._dtype = dtype
        self._sites = sites
        self._max_rank = max_rank

    @property
    def max_bytes(self) -> int:
        """The memory of an adapter of the greatest rank at all sites, in bytes."""
        return self._sites.num_values(self._max_rank) * self._dtype.itemsize

    @property
    def max_bytes_of_load(self) -> int:
        """The additional memory while such an adapter is loaded: its file, in float32."""
        return self._sites.num_values_of_file(self._max_rank) * 4 + _HEADER_BYTES

    def read(self, adapter: Adapter) -> LoadedAdapter:
        """Read and check an adapter; raise AdapterError, also if its files have another digest."""
        content = read_config_bytes(adapter.path)
        config = read_config(content, self._max_rank)
        weights = self._read_weights(adapter.path)
        if digest_of(content, [weights]) != adapter.digest:
            raise AdapterError(
                f"{adapter.path} has changed since it was loaded; load it under another name"
            )
        start = ctypes.addressof(ctypes.c_char.from_buffer(weights))
        products = dict(self._products(self._pairs(weights, start), config))
        return LoadedAdapter(self._library, self._dtype, self._sites, products)

    def _read_weights(self, path: str) -> memoryview:
        """Return the contents of the file; raise AdapterError if it is larger than any valid one.

        Their memory is mapped, since creating a `bytearray` of this size would stop other threads.
        """
        most = self.max_bytes_of_load
        try:
            with open_weights(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size > most:
                    raise AdapterError(
                        f"{WEIGHTS_FILE} has {size} bytes, more than the {most} of any adapter of"
                        f" max_lora_rank {self._max_rank} for this model"
                    )
                if size < _LENGTH_BYTES:
                    raise _not_safetensors("its header is cut off")
                content, first = memoryview(mmap.mmap(-1, size)), 0
                while first < size:
                    num_read = file.readinto(content[first : first + _CHUNK_BYTES])
                    if not num_read:
                        raise AdapterError(f"{WEIGHTS_FILE} became shorter while it was read")
                    first += num_read
        except OSError as error:
            raise AdapterError(f"{path}/{WEIGHTS_FILE}: {error.strerror or error}") from error
        return content

    def _pairs(self, content: memoryview, address: int) -> dict[str, _Pair]:
        """Return the matrices of each linear layer, by its name."""
        parts: dict[str, dict[str, Matrix]] = {}
        others = []
        for name, matrix in _tensors(content, address):
            match = _PART.fullmatch(name.removeprefix(_PREFIX))
            if match is None or not name.startswith(_PREFIX):
                others.append(name)
            else:
                parts.setdefault(match[1], {})[match[2]] = matrix
        if others:
            raise AdapterError(
                f"{WEIGHTS_FILE} has {_listed(others)}; only the matrices lora_A and lora_B of"
                f" linear layers are supported, under {_PREFIX}"
            )
        if not parts:
            raise AdapterError(f"{WEIGHTS_FILE} has no matrices")
        for module, found in parts.items():
            for kind in "AB":
                if kind not in found:
                    raise AdapterError(f"{WEIGHTS_FILE} has no {module}.lora_{kind}.weight")
        return {module: _Pair(found["A"], found["B"]) for module, found in parts.items()}

    def _products(
        self, pairs: Mapping[str, _Pair], config: PeftConfig
    ) -> Iterator[tuple[str, Product]]:
        others = {module for module in pairs if self._sites.is_elsewhere(module)}
        unknown = [m for m in pairs if m not in others and not self._sites.find(m)]
        if unknown:
            raise AdapterError(
                f"{WEIGHTS_FILE} has matrices for {_listed(unknown)}; this model takes adapters at"
                f" {', '.join(self._sites.allowed_names()) or 'no module'}"
            )
        for target in config.targets:
            if not any(f".{module}".endswith(f".{target}") for module in pairs):
                raise AdapterError(
                    f"target_modules has {target!r}, and {WEIGHTS_FILE} has no matrices for it"
                )
        taken: set[int] = set()
        for module, pair in pairs.items():
            if module in others:
                continue
            numbers = self._sites.find(module)
            if taken.intersection(numbers):
                raise AdapterError(f"{WEIGHTS_FILE} has matrices for {module} under two names")
            taken.update(numbers)
            self._check_shapes(module, pair, config.rank_of(module))
            sites = [self._sites.all[number] for number in numbers]
            down = pair.down.columns(sites[0].inputs.first, sites[0].num_inputs)
            up = [pair.up.rows(site.outputs.first, site.num_outputs) for site in sites]
            yield module, Product(down, up, config.scale_of(module))

    def _check_shapes(self, module: str, pair: _Pair, rank: int) -> None:
        sites = [self._sites.all[number] for number in self._sites.find(module)]
        num_outputs = sum(site.outputs.num_all for site in sites)
        expected = ((rank, sites[0].inputs.num_all), (num_outputs, rank))
        for matrix, shape in zip(pair, expected, strict=True):
            found = matrix.num_rows, matrix.num_columns
            if found != shape:
                raise AdapterError(
                    f"{WEIGHTS_FILE}: {matrix.name} has shape {list(found)}, and this model with"
                    f" rank {rank} needs {list(shape)}"
                )


def _tensors(content: memoryview, address: int) -> Iterator[tuple[str, Matrix]]:
    """Yield the tensors of a safetensors file at an address."""
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    begin = _LENGTH_BYTES + length
    if length > _HEADER_BYTES or begin > len(content):
        raise _not_safetensors("its header is cut off")
    try:
        header = msgspec.json.decode(
            bytes(content[_LENGTH_BYTES:begin]), type=dict[str, msgspec.Raw]
        )
        header.pop("__metadata__", None)
        tensors = {
            name: msgspec.json.decode(entry, type=_StoredTensor) for name, entry in header.items()
        }
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_safetensors(str(error)) from error
    for name, tensor in tensors.items():
        start, end = tensor.data_offsets
        shape = tensor.shape
        if tensor.dtype not in _ITEM_BYTES:
            raise AdapterError(
                f"{WEIGHTS_FILE}: {name} has dtype {tensor.dtype}, not one of"
                f" {', '.join(_ITEM_BYTES)}"
            )
        if len(shape) != 2 or 0 in shape:
            if _PART.fullmatch(name) is not None:
                raise AdapterError(f"{WEIGHTS_FILE}: {name} has shape {shape}, not two sizes")
            shape = [1, 1]  # any matrix: the caller refuses the tensor by its name
        elif end - start != shape[0] * shape[1] * _ITEM_BYTES[tensor.dtype]:
            raise AdapterError(f"{WEIGHTS_FILE}: {name} has {end - start} bytes, not its shape's")
        if begin + end > len(content) or start > end:
            raise AdapterError(f"{WEIGHTS_FILE}: {name} extends past the end of the file")
        place = address + begin + start
        yield name, Matrix(name, place, StoredType[tensor.dtype], shape[0], shape[1], shape[1])


def _not_safetensors(why: str) -> AdapterError:
    return AdapterError(f"{WEIGHTS_FILE} is not a safetensors file: {why}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_MAX_NAMES])
    return shown + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
