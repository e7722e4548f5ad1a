"""Reading weights: what is missing, misshapen or broken is named; what tells models apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from everystop.errors import ServiceError
from executor_svc.model.config import load_config
from executor_svc.model.identity import digest_files, fingerprint, read_tokenizer_files
from executor_svc.model.weights import DecoderWeights, load_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(folder, load_config(folder), dtype)


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors if tensor is None else {**tensors, name: tensor}, path)


def test_fused_projections_hold_their_parts_in_order(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    layer = load(folder).layers[1]
    parts = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.qkv.weight, torch.cat(parts))
    parts = [tensors[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.gate_up.weight, torch.cat(parts))


def test_weights_are_converted(folder: Path) -> None:
    head = load(folder, torch.bfloat16).head
    assert torch.equal(head, load_file(folder / "model.safetensors")["lm_head.weight"].bfloat16())


def test_weights_in_several_files_are_the_same(folder: Path) -> None:
    whole = load(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"model.norm.weight": torch.zeros(16)}, folder / "not-in-the-index.safetensors")
    parts = load(folder)
    assert torch.equal(parts.layers[0].qkv.weight, whole.layers[0].qkv.weight)
    assert torch.equal(parts.norm, whole.norm)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, r"has no tensor model\.norm\.weight"),
        (torch.ones(17), r"model\.norm\.weight of shape \[17\]; config\.json says \[16\]"),
        (torch.ones(16, dtype=torch.int8), r"model\.norm\.weight as torch\.int8"),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, tensor: torch.Tensor | None, message: str) -> None:
    change(folder, "model.norm.weight", tensor)
    with pytest.raises(ServiceError, match=message):
        load(folder)


def test_a_broken_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ServiceError, match="can't be read"):
        load(folder)


def test_the_fingerprint_changes_with_weights_config_and_tokenizer(folder: Path) -> None:
    first = fingerprint(folder, "tokenizer")
    assert fingerprint(folder, "tokenizer") == first
    assert fingerprint(folder, "another") != first
    change(folder, "model.norm.weight", torch.full((16,), 1.5))
    other_weights = fingerprint(folder, "tokenizer")
    assert other_weights != first
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert fingerprint(folder, "tokenizer") != other_weights


def test_the_tokenizers_files_are_those_of_the_folder(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
        (tmp_path / name).write_bytes(name.encode())
    files = read_tokenizer_files(tmp_path)
    assert files == {"tokenizer.json": b"tokenizer.json", "chat_template.jinja": b"chat_template.jinja"}


def test_the_digest_of_files_depends_on_names_and_contents_alone() -> None:
    digest = digest_files({"a": b"1", "b": b"2"})
    assert digest == digest_files({"b": b"2", "a": b"1"})
    assert len({digest, digest_files({"a": b"2", "b": b"1"}), digest_files({"a": b"1b", "": b"2"})}) == 3
