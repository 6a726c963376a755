"""Converts a GGUF model to a Hugging Face model directory: ``python -m kvrelay.launcher.convert GGUF OUT``.

It runs as its own process, so that the memory of transformers, torch and two copies of the weights is freed at its end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvrelay.common.errors import ModelError
from kvrelay.launcher.gguf_file import GgufFile
from kvrelay.launcher.gguf_rope import rope_parameters

_UNREAD = ("gpt-oss",)  # transformers looks for its scaling and its experts where no file has them
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
# Tokens that end a turn if the chat template writes them. gpt-oss alone ends only a part of an answer with <|end|>.
_TURN_ENDS = ("<end_of_turn>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>")


def convert_gguf(gguf: Path, output: Path) -> None:
    """Write config, bf16 weights, end tokens, tokenizer and chat template of ``gguf`` into the directory ``output``.

    Raises ModelError if the model there would be another one.
    """
    import torch  # noqa: PLC0415 - seconds to import
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    file = GgufFile(gguf)
    if file.architecture in _UNREAD:
        raise ModelError(f"{gguf}: no conversion reads {file.architecture} rightly; take the model's safetensors")
    rotations = rope_parameters(file)
    model, info = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    if missing := sorted(info["missing_keys"]):  # transformers makes random numbers of these
        raise ModelError(
            f"{gguf} lacks {len(missing)} tensors of {type(model).__name__}, {missing[0]} the first: take the model's safetensors"
        )
    _check_all_is_used(file, model)
    _complete(model.config, file, rotations)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    generation = model.generation_config
    ends = _end_tokens(file, generation.eos_token_id, tokenizer.get_vocab())
    generation.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def _check_all_is_used(file: GgufFile, model: Any) -> None:
    """Raises ModelError if the file holds more numbers than the model: transformers drops tensors that it does not know."""
    held = sum(int(tensor.n_elements) for name, tensor in file.tensors.items() if not name.startswith("rope_"))
    # By identity, so that a tied head counts once. Buffers such as a router's bias are among them.
    used = sum({id(kept): kept.numel() for kept in model.state_dict(keep_vars=True).values()}.values())
    if held > used:
        raise ModelError(
            f"{file.path} holds {held:,} numbers, {type(model).__name__} only {used:,}: "
            "some would be ignored; take the model's safetensors"
        )


def _complete(config: Any, file: GgufFile, rotations: dict[str, Any]) -> None:
    """Set what transformers does not read from the file."""
    if rotations:
        # Of models with parameters for each kind of layer, those without a window are scaled.
        config.rope_parameters.get("full_attention", config.rope_parameters).update(rotations)
    if config.num_hidden_layers == _LAYERS_OF_27B.get(config.model_type):
        # No field tells the scale of scores. llama.cpp, too, knows these two models by their layers; others have the default.
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    if config.model_type == "phi3" and (window := file.number("phi3.attention.sliding_window", 0.0)):
        config.sliding_window = int(window)


def _end_tokens(file: GgufFile, known: int | list[int] | None, vocabulary: dict[str, int]) -> list[int]:
    """All tokens that end an answer, ``known`` ones among them. A file tells one or two; a chat model may have more."""
    ends = set(known if isinstance(known, list) else [] if known is None else [known])
    fields = (file.number(f"tokenizer.ggml.{kind}_token_id", -1.0) for kind in ("eos", "eot", "eom"))
    ends |= {int(token_id) for token_id in fields if token_id >= 0}
    template = file.text("tokenizer.chat_template") or ""
    return sorted(ends | {vocabulary[token] for token in _TURN_ENDS if token in template and token in vocabulary})


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
