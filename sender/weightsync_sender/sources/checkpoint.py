"""A Hugging Face checkpoint folder: one or many safetensors files, mapped into memory, never loaded whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weightsync_core.errors import SourceError, listing
from weightsync_sender.sources._base import TensorMeta

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""safetensors' names of dtypes (https://huggingface.co/docs/safetensors)."""


class CheckpointSource:
    """Tensors of a checkpoint folder, in the order in which they lie in its files."""

    keeps_tensors = True

    def __init__(self, folder: str | Path) -> None:
        """Read the index and all headers.

        Raises:
            SourceError: no safetensors files, a file that is cut short, an index that names what is not there, or one
                tensor in two files.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise SourceError(f"no checkpoint at {self.folder}: that is no folder; expected one with config.json and *.safetensors")
        self._files = self._find_files()
        self._manifest: dict[str, TensorMeta] = {}
        self._home: dict[str, Path] = {}
        for file in self._files:
            self._read_header(file)
        if not self._manifest:
            raise SourceError(f"checkpoint {self.folder} has no tensors")

    def manifest(self) -> Mapping[str, TensorMeta]:
        return self._manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self._files:
            with _opened(file) as opened:
                for name in opened.offset_keys():
                    if self._home.get(name) == file:
                        yield name, opened.get_tensor(name)

    def _find_files(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        present = sorted(self.folder.glob("*.safetensors"))
        if not index.exists():
            if not present:
                raise SourceError(f"checkpoint {self.folder} has no *.safetensors; convert it, or point at the folder that holds them")
            return present
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SourceError(f"cannot read {index}: {type(error).__name__}: {error}; expected an object with weight_map") from error
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise SourceError(f"cannot read {index}: expected weight_map to name a file for each tensor")
        files = [self.folder / name for name in dict.fromkeys(weight_map.values())]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise SourceError(f"{index.name} names files that are not in {self.folder}: {listing(absent)}; complete the download")
        self._weight_map = weight_map
        return files

    def _read_header(self, file: Path) -> None:
        weight_map: dict[str, str] = getattr(self, "_weight_map", {})
        expected = {name for name, home in weight_map.items() if home == file.name}
        with _opened(file) as opened:
            names = set(opened.keys())
            for name in expected - names:
                raise SourceError(f"{file.name} lacks tensor {name!r}, which the checkpoint's index places there", names=[name])
            for name in expected or names:
                if name in self._home:
                    raise SourceError(f"tensor {name!r} is in {self._home[name].name} and in {file.name}", names=[name])
                header = opened.get_slice(name)
                dtype = _DTYPES.get(header.get_dtype())
                if dtype is None:
                    raise SourceError(f"tensor {name!r} has dtype {header.get_dtype()}, which is not supported", names=[name])
                self._manifest[name] = TensorMeta(tuple(header.get_shape()), dtype)
                self._home[name] = file


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise SourceError(f"cannot open {file}: {error}; the file may be cut short") from error
