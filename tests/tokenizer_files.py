"""Tokenizer and chat template of a small model, as files of its directory."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers


def save_tokenizer(directory: Path, vocab_size: int, special_tokens: list[str], text: str, chat_template: str) -> None:
    """Save a byte-level tokenizer of ``vocab_size`` ids that knows the words of ``text``. ``<eos>`` ends its outputs."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text] * 9, trainer)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (directory / "chat_template.jinja").write_text(chat_template)
