from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weightsync_core.errors import SourceError
from weightsync_devkit import zoo
from weightsync_sender.sources import CheckpointSource, MemorySource, TensorMeta, as_source, is_collective, meta_of


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_hands_out_what_it_states(shards: int, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("qwen3_fp8", 1, shards)
    source = CheckpointSource(folder)
    _, tensors = zoo.make("qwen3_fp8", 1)
    assert {name: meta_of(tensor) for name, tensor in tensors.items()} == dict(source.manifest())
    for _ in range(2):
        given = dict(source.tensors())
        assert given.keys() == tensors.keys()
        assert all(torch.equal(given[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors)


def test_tensors_stay_good_after_their_file_is_closed(checkpoint: Callable[..., Path]) -> None:
    tensors = list(CheckpointSource(checkpoint("qwen3", 1)).tensors())
    expected = load_file(checkpoint("qwen3", 1) / "model.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors)


def spoiled(tmp_path: Path, spoil: Callable[[Path], object]) -> Path:
    folder = zoo.write("qwen3", tmp_path / "m", 1, shards=2)
    spoil(folder)
    return folder


def cut(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def lose_file(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def lose_tensor(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)


def break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def strange_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": 5}}))


def double(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    first, second = sorted(folder.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def strange_dtype(folder: Path) -> None:
    empty(folder)
    header = json.dumps({"x": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, "cannot open .*cut short"),
        (lose_file, "names files that are not in"),
        (lose_tensor, "lacks tensor"),
        (break_index, "expected an object with weight_map"),
        (strange_index, "expected weight_map to name a file"),
        (double, "is in .* and in"),
        (empty, r"has no \*\.safetensors"),
        (strange_dtype, "C64|cannot open"),
    ],
)
def test_a_broken_checkpoint_is_named(spoil: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=words):
        CheckpointSource(spoiled(tmp_path, spoil))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is no folder"):
        CheckpointSource(tmp_path / "nowhere")


def test_what_a_trainer_holds_becomes_a_source() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.ones(3, dtype=torch.bfloat16)}
    for given in (tensors, list(tensors.items()), iter(tensors.items()), MemorySource(tensors)):
        source = as_source(given)
        assert dict(source.manifest()) == {name: meta_of(tensor) for name, tensor in tensors.items()}
        assert [name for name, _ in source.tensors()] == ["a", "b"]


def test_parameters_are_taken_without_their_gradients() -> None:
    ((_, tensor),) = as_source({"w": torch.nn.Parameter(torch.zeros(2))}).tensors()
    assert not tensor.requires_grad


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([("a", torch.zeros(1))] * 2, "given twice"),
        ([1], "expected \\(name, tensor\\)"),
        ({"a": 3}, "is a int"),
        ({"a": torch.zeros(2, device="meta")}, "is on meta"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "sparse"),
    ],
)
def test_what_is_no_tensor_is_named(given: object, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        as_source(given)  # type: ignore[arg-type]


def test_parts_of_tensors_are_gathered_where_all_ranks_can_and_never_taken_for_the_whole() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        whole = torch.arange(6.0).reshape(3, 2)
        given = {"a": torch.distributed.tensor.distribute_tensor(whole, mesh), "b": torch.ones(2)}
        for source in (as_source(given), as_source(list(given.items()))):
            assert is_collective(source)
            assert source.manifest()["a"] == TensorMeta((3, 2), torch.float32)
            handed = dict(source.tensors())
            assert torch.equal(handed["a"], whole)
            assert type(handed["a"]) is torch.Tensor
        with pytest.raises(SourceError, match="full_tensor"):
            MemorySource(given)
    finally:
        torch.distributed.destroy_process_group()
