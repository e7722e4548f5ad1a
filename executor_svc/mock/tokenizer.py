"""A byte-level tokenizer in the files of a real one: token id = byte, and three special tokens after those.

Nothing is ever merged, so every text has an encoding, and each character outside of ASCII is split into several tokens.
"""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = range(256, 259)
VOCAB_SIZE = 259

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_files() -> dict[str, bytes]:
    """The files by name, as a model's folder would have them."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    special_tokens = {"bos_token": END_OF_TEXT, "eos_token": TURN_END, "pad_token": END_OF_TEXT}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(special_tokens).encode(),
        "chat_template.jinja": _CHAT_TEMPLATE.encode(),
    }


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte.

    Printable Latin-1 stands for itself; the other bytes take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
