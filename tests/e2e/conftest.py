"""The default model, and transformers as the reference that it is compared with.

The first use on a machine fetches and converts the model (about a minute); later ones find it in the cache.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from executor_svc.model.source import resolve

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The Hugging Face folder of the default model."""
    return resolve("default").path


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of the default model."""
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def reference_model(model_dir: Path) -> "LlamaForCausalLM":
    """The default model in transformers, float32, ready for inference."""
    import torch
    from transformers import AutoModelForCausalLM

    model: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return model.eval()
