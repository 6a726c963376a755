"""Converts a GGUF model to a Hugging Face model directory: ``python -m kvrelay.launcher.convert GGUF OUT``.

It runs as its own process, so that the memory of transformers, torch and two copies of the weights is freed at its end.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvrelay.common.errors import ModelError
from kvrelay.launcher.gguf_rope import rope_scaling


def convert_gguf(gguf: Path, output: Path) -> None:
    """Write config, bf16 weights, tokenizer and chat template of ``gguf`` into the directory ``output``. Raises ModelError."""
    import torch  # noqa: PLC0415 - seconds to import
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    scaling = rope_scaling(gguf)
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
    if scaling:
        parameters = model.config.rope_parameters
        # Of models with parameters for each kind of layer, those without a window are scaled.
        parameters.get("full_attention", parameters).update(scaling)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(output)


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
