"""Safetensors files: the expected tensors, and reading them one by one."""

from __future__ import annotations

import abc
import contextlib
import functools
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_attn.models._config.directory import ModelDirectoryError, existing, read_json
from jax_attn.models._config.keys import one_of
from jax_attn.models._config.quantized_files import FLOATS, Rows, Tensor, name_of
from jax_attn.models._weights.protocols import CheckpointConfig
from jax_attn.models._weights.tensors import Shape

_DTYPES = ("bfloat16", "float16", "float32")
_WEIGHT = ".weight"
_COMPARED = 1 << 22  # elements that are compared at a time


class Expected(abc.ABC):
    """The tensors that the files of a model must or may contain."""

    def __init__(
        self,
        config: CheckpointConfig,
        shapes: dict[str, Shape],
        optional: dict[str, Shape] | None = None,
        tables: tuple[str, ...] = (),
        aliases: tuple[tuple[str, str], ...] = (),
    ):
        """shapes: of the tensors that must be there. optional: of others that are read if they
        are. tables: of embeddings, which are never quantized. aliases: see ModelConfig."""
        self.config, self.shapes, self._optional = config, shapes, optional or {}
        self._aliases = aliases
        # The tensors of matrices that may be quantized: by stem, then by name.
        self.of_matrix: dict[str, dict[str, Tensor]] = {}
        if config.quantization is not None and config.quantization.method != "mxfp4":
            for name, shape in self.shapes.items():
                if name.endswith(_WEIGHT) and len(shape) == 2 and name not in tables:
                    stem = name.removesuffix(_WEIGHT)
                    self.of_matrix[stem] = config.quantization.tensors(*shape)

    def name(self, full_name: str) -> str:
        """Returns the name that `shapes` has, of several names of a tensor.

        Removes tensor_prefix, and adds the "model." that files of models without a head lack.
        """
        name = full_name.removeprefix(self.config.tensor_prefix)
        longer = f"model.{name}"
        is_known = longer in self.shapes or longer.rpartition(".")[0] in self.of_matrix
        name = longer if is_known else name
        for other, usual in self._aliases:
            if self.find(name) is None and self.find(name.replace(other, usual)) is not None:
                return name.replace(other, usual)
        return name

    def find(self, name: str) -> tuple[str, tuple[Tensor, ...]] | None:
        """Returns a tensor's internal name and its allowed shapes and dtypes; None if it is not a
        part of the model."""
        plain = self.shapes.get(name, self._optional.get(name))
        stem, _, suffix = name.rpartition(".")
        part = self.of_matrix.get(stem, {}).get(name_of(suffix))
        if plain is None and part is None:
            return None
        allowed = () if part is None else (part,)
        if plain is not None:
            allowed = (Tensor((plain,), _dtypes(name)), *allowed)
        return f"{stem}.{name_of(suffix)}" if stem else name, allowed

    @abc.abstractmethod
    def is_passed_over(self, name: str) -> bool:
        """Whether a tensor appears in files of other programs but is not needed here."""

    def is_bias_of_zeros(self, name: str) -> bool:
        """Whether it is a bias that GPTQ files add, though the model has none; must be zeros."""
        stem, _, suffix = name.rpartition(".")
        quantization = self.config.quantization
        is_gptq = quantization is not None and quantization.layout == "gptq"
        return is_gptq and suffix == "bias" and stem in self.of_matrix

    def missing(self, tensors: Mapping[str, Any]) -> list[str]:
        missing = set(self.shapes) - set(tensors)
        for stem, parts in self.of_matrix.items():
            name = stem + _WEIGHT
            if name in tensors and tensors[name].dtype in FLOATS:
                continue  # not quantized
            needed = {f"{stem}.{part}" for part, tensor in parts.items() if tensor.is_needed}
            if any(part in tensors for part in needed):
                missing.discard(name)
                missing |= needed - set(tensors)
        return sorted(missing)


class _InFile(NamedTuple):
    """A tensor in an open file."""

    file: Any
    path: Path
    name: str  # its name in the file
    shape: Shape
    dtype: str

    def read(self) -> np.ndarray:
        if self.dtype == "F8_E4M3":  # numpy lacks this dtype
            return _bytes_of(self.path, self.name).reshape(self.shape)
        return self.file.get_tensor(self.name)

    def rows(self, begin: int, end: int) -> np.ndarray:
        return self.file.get_slice(self.name)[begin : min(end, self.shape[0])]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class FileTensors:
    """The tensors of the files, each read on demand."""

    def __init__(
        self,
        files: dict[str, _InFile],
        expected: Expected,
        progress: Callable[[int, int], None] | None,
    ):
        self._files, self._expected, self._progress = files, expected, progress
        self._num_read, self._num_all = 0, sum(tensor.size for tensor in files.values())

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._files[name].read()
        self._num_read += tensor.size
        if self._progress is not None:
            self._progress(self._num_read, self._num_all)
        return tensor

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def are_equal(self, name: str, other: str) -> bool:
        """Compares two tensors of one shape, some rows at a time."""
        one, two = self._files[name], self._files[other]
        rows = max(1, _COMPARED // math.prod(one.shape[1:]))
        return all(
            np.array_equal(one.rows(begin, begin + rows), two.rows(begin, begin + rows))
            for begin in range(0, one.shape[0], rows)
        )

    def matrix(self, name: str) -> np.ndarray | Rows:
        """Returns a matrix as an array, or as Rows if it is quantized in the files."""
        stem = name.removesuffix(_WEIGHT)
        parts = self._expected.of_matrix.get(stem)
        if parts is None or (name in self._files and self._files[name].dtype in FLOATS):
            return self[name]
        quantization = self._expected.config.quantization
        assert quantization is not None

        def get(part: str) -> np.ndarray | None:
            return self[f"{stem}.{part}"] if f"{stem}.{part}" in self._files else None

        try:
            return quantization.read(get, *self._expected.shapes[name])
        except ValueError as error:
            raise self.error(name, str(error)) from None

    def error(self, name: str, message: str) -> ModelDirectoryError:
        """Makes an error. name: a tensor, or a matrix whose tensors have other names."""
        parts = self._expected.of_matrix.get(stem := name.removesuffix(_WEIGHT), ())
        names = [name, *(f"{stem}.{part}" for part in parts)]
        found = next(self._files[each] for each in names if each in self._files)
        return ModelDirectoryError(f"{found.path}: tensor '{found.name}': {message}")


def weights_dtype(dtype: Any) -> np.dtype:
    """`dtype` of weights in memory. Raises ValueError for one that cannot hold them."""
    try:
        known = jnp.dtype(dtype)
    except TypeError:  # a name that numpy does not know
        known = None
    if known is None or known.name not in _DTYPES:
        raise ValueError(
            f"load_params: dtype: expected {one_of(_DTYPES)}, got {dtype!r}; weights that the files"
            " have in few bits stay so with any of them."
        )
    return known


def open_tensors(
    stack: contextlib.ExitStack,
    directory: str | Path,
    expected: Expected,
    progress: Callable[[int, int], None] | None,
) -> FileTensors:
    """Opens model.safetensors or its shards. The files stay open as long as `stack`.

    Raises: see `load_params`.
    """
    tensors: dict[str, _InFile] = {}
    for path in _weight_files(Path(directory)):
        tensors |= _tensors_of(stack, path, expected)
    if missing := expected.missing(tensors):
        raise ModelDirectoryError(
            f"{directory}: tensor '{expected.config.tensor_prefix}{missing[0]}' is missing, with "
            f"{len(missing) - 1} more"
        )
    return FileTensors(tensors, expected, progress)


def tensor_names(directory: Path) -> list[str]:
    """Returns the names of all tensors of the files. Raises ModelDirectoryError."""
    names: list[str] = []
    for path in _weight_files(directory):
        with _opened(path) as file:
            names += file.keys()
    return names


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ModelDirectoryError(f"{path}: not a safetensors file: {error}") from error


def _weight_files(directory: Path) -> list[Path]:
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        advice = ""
        if any(directory.glob("*.gguf")):
            advice = "; GGUF files are not read, only safetensors"
        if pickled := [*directory.glob("*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth")]:
            advice = f"; convert {min(pickled).name} to safetensors"
        raise ModelDirectoryError(
            f"{directory}: neither {whole.name} nor {index.name} is there{advice}"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelDirectoryError(f"{index}: key 'weight_map' is missing")
    names = set(map(str, weight_map.values()))
    for name in names:
        # The index is untrusted: it may only name files of this directory.
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ModelDirectoryError(
                f"{index}: weight_map: expected names of files in this directory, got {name!r}"
            )
    return [existing(directory / name) for name in sorted(names)]


def _tensors_of(
    stack: contextlib.ExitStack, path: Path, expected: Expected
) -> Iterable[tuple[str, _InFile]]:
    """Opens one file and checks its tensors. The file stays open as long as `stack`."""
    config = expected.config
    file = stack.enter_context(_opened(path))
    for full_name in file.keys():
        name = expected.name(full_name)
        where = f"{path}: tensor '{full_name}'"
        found = expected.find(name)
        if found is None and expected.is_passed_over(name):
            continue
        if found is None and expected.is_bias_of_zeros(name):
            if file.get_tensor(full_name).any():
                raise ModelDirectoryError(f"{where}: expected zeros, as the model has no such bias")
            continue
        if found is None:
            raise ModelDirectoryError(
                f"{where} is no part of a {config.family} model with this config"
            )
        header = file.get_slice(full_name)
        shape, dtype = tuple(header.get_shape()), header.get_dtype()
        known, allowed = found
        shapes = [shape for tensor in allowed for shape in tensor.shapes]
        if shape not in shapes:
            words = " or ".join(map(str, dict.fromkeys(shapes)))
            raise ModelDirectoryError(f"{where}: expected shape {words}, got {shape}")
        dtypes = [dtype for tensor in allowed for dtype in tensor.dtypes]
        if dtype not in dtypes:
            words = " or ".join(", ".join(dtypes).rsplit(", ", 1))
            raise ModelDirectoryError(f"{where}: expected dtype {words}, got {dtype}")
        yield known, _InFile(file, path, full_name, shape, dtype)


def _dtypes(name: str) -> tuple[str, ...]:
    return ("U8",) if name.endswith(("_blocks", "_scales")) else FLOATS


def _bytes_of(path: Path, name: str) -> np.ndarray:
    """Returns the bytes of a tensor, u8 [n], located by the file's header."""
    header, data = _header_of(path)
    begin, end = header[name]["data_offsets"]
    return np.fromfile(path, np.uint8, end - begin, offset=data + begin)


@functools.lru_cache(maxsize=1)  # a header may have tens of thousands of tensors
def _header_of(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header, and the offset at which the data begins."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(size)), 8 + size
