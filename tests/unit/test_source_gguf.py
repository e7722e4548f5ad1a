"""GGUF files to Hugging Face folders: tiny random models go there and back, and compute the same bits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from everystop.errors import ServiceError
from executor_svc.model import gguf_weights
from executor_svc.model.source import resolve

HIDDEN, HEADS, KV_HEADS, LAYERS, VOCAB, LENGTH = 64, 4, 2, 2, 40, 16384
TOKENS = ["<|endoftext|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", "ab", "cd"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

Changes = dict[str, object]


def write_metadata(writer: gguf.GGUFWriter, **changes: object) -> None:
    """What every file here has; a change of None leaves a key out."""
    prefix = writer.arch
    metadata: dict[str, object] = {
        f"{prefix}.context_length": LENGTH,
        f"{prefix}.embedding_length": HIDDEN,
        f"{prefix}.block_count": LAYERS,
        f"{prefix}.feed_forward_length": 96,
        f"{prefix}.attention.head_count": HEADS,
        f"{prefix}.attention.head_count_kv": KV_HEADS,
        f"{prefix}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{prefix}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }
    metadata |= {key.replace("ARCH", prefix): value for key, value in changes.items()}
    kinds = {
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING,
        bool: gguf.GGUFValueType.BOOL,
    }
    for key, value in metadata.items():
        if value is not None:
            writer.add_key_value(key, value, kinds[type(value)])
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b", "c d"])


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_row_order(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama.cpp's own converter orders them for its rotary embedding: row by row, not by reshaping."""
    half = values.shape[0] // num_heads // 2
    rows = [
        head * 2 * half + part * half + pair for head in range(num_heads) for pair in range(half) for part in (0, 1)
    ]
    return values[rows]


def random_tensors() -> dict[str, np.ndarray]:
    """The tensors of a tied model of the sizes above, under their GGUF names."""
    draw = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        parts |= {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
        }
        parts |= {"ffn_gate": (96, HIDDEN), "ffn_up": (96, HIDDEN), "ffn_down": (HIDDEN, 96)}
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return {name: draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_random(path: Path, architecture: str = "llama", **changes: object) -> dict[str, np.ndarray]:
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, **changes)
    tensors = random_tensors()
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)
    return tensors


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


# Each: architecture, what the Hugging Face configuration has beside the sizes, what the metadata has.
ROUND_TRIPS: dict[str, tuple[str, Changes, Changes]] = {
    "llama": ("llama", {}, {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama-wide-heads": (
        "llama",
        {"head_dim": 32},
        {"ARCH.attention.key_length": 32, "ARCH.attention.value_length": 32},
    ),
    "llama-linear": (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 2.0},
    ),
    "llama3": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
        {},
    ),
    "mistral": ("mistral", {"sliding_window": 4}, {"ARCH.attention.sliding_window": 4}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2-yarn": (
        "qwen2",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {
            "ARCH.rope.scaling.type": "yarn",
            "ARCH.rope.scaling.factor": 4.0,
            "ARCH.rope.scaling.original_context_length": 64,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}, {}),
}


def random_model(model_type: str, extra: Changes) -> Any:
    """A transformers model of the sizes above, every parameter random, biases and norms too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": LENGTH}
    config = AutoConfig.for_model(model_type, **(sizes | {"rope_theta": 10000.0, "rms_norm_eps": 1e-6} | extra))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def write_model(path: Path, model: Any, architecture: str, metadata: Changes) -> None:
    """Write a transformers model as llama.cpp would."""
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, **metadata)
    arch = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch, LAYERS)
    for hf_name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if architecture == "llama" and ".q_proj" in hf_name:
            values = llama_cpp_row_order(values, HEADS)
        if architecture == "llama" and ".k_proj" in hf_name:
            values = llama_cpp_row_order(values, KV_HEADS)
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None
        writer.add_tensor(name, values)
    if model.config.rope_parameters["rope_type"] == "llama3":
        plain = 10000.0 ** -(np.arange(0, 16, 2, dtype=np.float32) / 16)
        writer.add_tensor("rope_freqs.weight", plain / model.model.rotary_emb.inv_freq.numpy())
    finish(writer)


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_converted_model_computes_the_same_bits(case: str, gguf_path: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model_type, extra, metadata = ROUND_TRIPS[case]
    model = random_model(model_type, extra)
    write_model(gguf_path, model, "llama" if model_type == "mistral" else model_type, metadata)
    folder = resolve(str(gguf_path), tmp_path / "cache").path
    converted, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    assert converted.dtype is torch.float32
    token_ids = torch.arange(VOCAB)[None]
    with torch.inference_mode():
        assert torch.equal(converted.eval()(token_ids).logits, model(token_ids).logits)


def test_folder_beside_the_weights(gguf_path: Path, tmp_path: Path) -> None:
    write_random(gguf_path)
    resolved = resolve(str(gguf_path), tmp_path / "cache")
    assert resolved.name == "tiny"
    assert (resolved.path / "chat_template.jinja").read_text() == TEMPLATE
    generation = json.loads((resolved.path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": [1, 0], "pad_token_id": None}
    tokenizer_config = json.loads((resolved.path / "tokenizer_config.json").read_text())
    assert (tokenizer_config["bos_token"], tokenizer_config["eos_token"]) == ("<|endoftext|>", "<|im_end|>")
    config = json.loads((resolved.path / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-6
    assert config["eos_token_id"] == [1, 0]


def test_file_is_converted_once_until_it_changes(gguf_path: Path, tmp_path: Path) -> None:
    write_random(gguf_path)
    first = resolve(str(gguf_path), tmp_path / "cache").path
    (first / "mark").touch()
    assert (resolve(str(gguf_path), tmp_path / "cache").path / "mark").exists()
    write_random(gguf_path, **{"ARCH.rope.freq_base": 500000.0})
    second = resolve(str(gguf_path), tmp_path / "cache").path
    assert json.loads((second / "config.json").read_text())["rope_theta"] == 500000.0


def test_quantized_weights_are_saved_as_bfloat16(gguf_path: Path, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(gguf_path, "llama")
    write_metadata(writer)
    tensors = random_tensors()
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    finish(writer)
    folder = resolve(str(gguf_path), tmp_path / "cache").path
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    up = tensors["blk.1.ffn_up.weight"]
    expected = gguf.dequantize(gguf.quantize(up, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(weights["model.layers.1.mlp.up_proj.weight"], torch.tensor(expected).bfloat16())


def test_large_model_is_saved_in_parts(gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = write_random(gguf_path)
    monkeypatch.setattr(gguf_weights, "_MAX_SHARD_BYTES", 50_000)
    folder = resolve(str(gguf_path), tmp_path / "cache").path
    parts = sorted(folder.glob("*.safetensors"))
    assert len(parts) > 2
    assert parts[0].name == f"model-00001-of-{len(parts):05d}.safetensors"
    assert all(part.stat().st_size < 55_000 for part in parts)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(weight_map) == len(tensors)
    for part in parts:
        assert set(load_file(part)) == {name for name, file in weight_map.items() if file == part.name}


REFUSALS: dict[str, tuple[str, Changes, str]] = {
    "architecture": ("gemma2", {}, "architecture gemma2 is not supported; supported: llama, qwen2, qwen3"),
    "experts": ("llama", {"ARCH.expert_count": 8}, "mixtures of experts"),
    "partial-rotary": ("llama", {"ARCH.rope.dimension_count": 8}, "rotary embedding of a part"),
    "value-length": ("llama", {"ARCH.attention.value_length": 8}, "different lengths"),
    "rope-scaling": ("llama", {"ARCH.rope.scaling.type": "longrope"}, "rope scaling longrope is not supported"),
    "no-key": ("llama", {"ARCH.block_count": None}, r"has no llama\.block_count"),
    "key-type": ("llama", {"ARCH.block_count": "two"}, r"llama\.block_count must be of type int, not str"),
    "split": ("llama", {"split.count": 3}, "one part of several"),
    "no-tensor": ("llama", {"ARCH.block_count": 3}, r"has no tensor blk\.2\..* \(9 missing\)"),
    "extra-tensor": ("llama", {"ARCH.block_count": 1}, r"tensor blk\.1\..* is unknown .* \(9 such\)"),
    "qwen2-without-bias": ("qwen2", {}, r"has no tensor blk\.0\.attn_k\.bias"),
    "special-id": ("llama", {"tokenizer.ggml.eos_token_id": 40}, "eos_token_id is 40, but there are 40 tokens"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_file_that_cannot_be_converted_faithfully_is_refused(case: str, gguf_path: Path, tmp_path: Path) -> None:
    architecture, changes, message = REFUSALS[case]
    write_random(gguf_path, architecture, **changes)
    with pytest.raises(ServiceError, match=f"^model: tiny.gguf: .*{message}"):
        resolve(str(gguf_path), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_rope_divisors_of_another_rule_are_refused(gguf_path: Path, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(gguf_path, "llama")
    write_metadata(writer)
    for name, values in random_tensors().items():
        writer.add_tensor(name, values)
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, 8, dtype=np.float32))
    finish(writer)
    with pytest.raises(ServiceError, match=r"rope_freqs\.weight does not follow"):
        resolve(str(gguf_path), tmp_path / "cache")


@pytest.mark.parametrize(
    "damage",
    [lambda whole: b"not a GGUF file", lambda whole: b"", lambda whole: whole[:1000], lambda whole: whole[:-5000]],
    ids=["other", "empty", "cut-in-metadata", "cut-in-tensors"],
)
def test_damaged_file_is_refused(damage: Callable[[bytes], bytes], gguf_path: Path, tmp_path: Path) -> None:
    write_random(gguf_path)
    gguf_path.write_bytes(damage(gguf_path.read_bytes()))
    with pytest.raises(ServiceError, match="not a whole GGUF file"):
        resolve(str(gguf_path), tmp_path / "cache")
