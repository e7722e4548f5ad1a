"""Which models are taken, and what is refused how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig

from everystop.errors import ServiceError
from executor_svc.model.config import from_hf_config, load_config


def llama(**changes: Any) -> PreTrainedConfig:
    return LlamaConfig(**{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 1000, **changes})


def write_config(folder: Path, eos_token_id: Any, generation: dict[str, Any]) -> Path:
    llama(eos_token_id=eos_token_id).save_pretrained(folder)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_an_unsupported_architecture_is_refused_with_those_that_are() -> None:
    with pytest.raises(ServiceError, match="BloomForCausalLM is not supported; supported: LlamaForCausalLM, Mistral"):
        from_hf_config(llama(architectures=["BloomForCausalLM"]), ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
    ],
)
def test_what_would_compute_something_else_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ServiceError, match=message):
        from_hf_config(llama(**changes), ())


@pytest.mark.parametrize(
    ("parameter", "message"),
    [({"rope_type": "spiral"}, "'spiral'.* default, linear"), ({"partial_rotary_factor": 0.5}, "partial")],
)
def test_an_unsupported_rotation_is_refused(parameter: dict[str, Any], message: str) -> None:
    config = llama()
    config.rope_parameters = {**config.rope_parameters, **parameter}
    with pytest.raises(ServiceError, match=message):
        from_hf_config(config, ())


@pytest.mark.parametrize(
    ("rope", "max_positions"),
    [
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "linear", "factor": 2.5}, 2500),
        ({"rope_type": "dynamic", "factor": 2.0}, 2000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}, 2000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
    ],
)
def test_a_scaling_stretches_the_positions(rope: dict[str, Any], max_positions: int) -> None:
    config = from_hf_config(llama(rope_parameters={"rope_theta": 1e4, **rope}), ())
    assert config.rope.max_positions == max_positions


def test_dynamic_rotation_follows_the_longest_sequence() -> None:
    rope = from_hf_config(llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), ()).rope
    within, beyond = rope.inverse_frequencies(1000)[0], rope.inverse_frequencies(2000)[0]
    assert torch.equal(within, rope.inverse_frequencies(10)[0])
    assert (beyond[1:] < within[1:]).all()


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, {}, (2,)),
        ([7, 5, 7], {}, (5, 7)),
        (2, {"eos_token_id": [9, 2]}, (2, 9)),
        (2, {"temperature": 0.5}, (2,)),
        (None, {}, ()),
    ],
)
def test_the_generation_config_says_what_ends_a_sequence(
    tmp_path: Path, in_config: Any, in_generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert load_config(write_config(tmp_path, in_config, in_generation)).eos_token_ids == expected


def test_an_unreadable_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ServiceError, match=r"config\.json of .* can't be read"):
        load_config(tmp_path)
