"""A GGUF file to a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

from executor_svc.model.gguf_config import model_config
from executor_svc.model.gguf_file import GgufFile
from executor_svc.model.gguf_tokenizer import TokenizerParts, tokenizer_parts
from executor_svc.model.gguf_weights import check_tensors, save_weights, weights_dtype


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model of the GGUF file at `path` into `folder`, an existing one.

    Weights (dequantized), configuration, tokenizer and chat template are what the original folder had, as far as GGUF
    keeps them. Raises ServiceError INVALID_ARGUMENT for a file that can't be converted faithfully, and OSError when
    `folder` can't be written.
    """
    file = GgufFile(path)
    config = model_config(file)
    check_tensors(file, config)
    tokenizer = tokenizer_parts(file)
    dtype = weights_dtype(file)
    ids = _special_ids(tokenizer)
    config |= ids | {"dtype": str(dtype).removeprefix("torch.")}
    tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer.config)
    _write_json(folder / "generation_config.json", ids)
    if tokenizer.chat_template:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    save_weights(file, config, dtype, folder)
    _write_json(folder / "config.json", config)


def _special_ids(parts: TokenizerParts) -> dict[str, object]:
    # One id is written bare, as Hugging Face folders have it.
    eos = parts.eos_token_ids[0] if len(parts.eos_token_ids) == 1 else parts.eos_token_ids
    return {"bos_token_id": parts.bos_token_id, "eos_token_id": eos, "pad_token_id": parts.pad_token_id}


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
