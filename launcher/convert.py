"""Converts a GGUF model to a Hugging Face model directory: ``python -m kvrelay.launcher.convert GGUF OUT``.

It runs as its own process, so that the memory of transformers, torch and two copies of the weights is freed at its end.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert_gguf(gguf: Path, output: Path) -> None:
    """Write config, bf16 weights, tokenizer and chat template of ``gguf`` into the directory ``output``."""
    import torch  # noqa: PLC0415 - seconds to import
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(output)


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
