"""Tiny random models on disk, and helpers that run sequences through an engine as a scheduler does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.guides.compiler import GrammarCompiler
from kvrelay.engine.guides.vocabulary import load_vocabulary
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.launcher.models import resolve_model

VOCAB = 199
DEMO_VOCAB = 49_152

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # large, so that attention is not uniform and mistakes show
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def save_model(directory: Path, config: Any, *, shard_size: str = "5GB", dtype: torch.dtype = torch.float32) -> Any:
    """Save a random transformers model of ``config`` to ``directory`` and return it. Norms and biases are random,
    too."""
    torch.manual_seed(7)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model.eval()


def assert_same_tokens(given: list[SampledToken], expected: list[SampledToken], bound: float = 1e-5) -> None:
    """Compare tokens exactly and log probabilities within ``bound``. In fp32 a product's rounding may depend on the
    batch."""
    assert [token.token_id for token in given] == [token.token_id for token in expected]
    for ours, theirs in zip(given, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=bound)
        assert dict(ours.top_logprobs) == pytest.approx(dict(theirs.top_logprobs), abs=bound)


def load(directory: Path, **options: Any) -> TorchEngine:
    """An engine on one CPU thread, by default with a pool of 96 blocks of 16 tokens."""
    chosen: dict[str, Any] = {"model_id": "tiny", "device": "cpu", "num_blocks": 96, **options}
    return TorchEngine.load(EngineOptions(model_dir=directory, **chosen), lambda done, total: None)


def tokens(seed: int, count: int) -> list[int]:
    """Random token ids."""
    generator = random.Random(seed)
    return [generator.randrange(VOCAB) for _ in range(count)]


def sequence(token_ids: list[int], blocks: list[int], *, num_groups: int = 1, **sampling: Any) -> Sequence:
    """A sequence that holds ``blocks``, each with a physical block in every group. Greedy by default."""
    params = SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **sampling})
    return Sequence(
        "r",
        1,
        list(token_ids),
        len(token_ids),
        params,
        0.0,
        block_tables=[[block_id * num_groups + group for block_id in blocks] for group in range(num_groups)],
    )


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A plain Llama with three query heads for each KV head."""
    directory = tmp_path_factory.mktemp("llama")
    return directory, save_model(directory, transformers.LlamaConfig(**SIZES))


@pytest.fixture(scope="session")
def demo_directory() -> Path:
    """The demo model's directory, converted on first use, for its tokenizer."""
    return resolve_model("demo")


@pytest.fixture(scope="session")
def vocabulary(demo_directory: Path) -> list[bytes]:
    """The bytes of the demo model's tokens. Special tokens begin with a byte that is in no text."""
    tokens = load_vocabulary(demo_directory, DEMO_VOCAB)
    special = [b"\xff" if tokens.is_special_token(token_id) else b"" for token_id in range(DEMO_VOCAB)]
    return [mark + tokens.decode_bytes([token_id]) for token_id, mark in enumerate(special)]


@pytest.fixture(scope="session")
def guide_compiler(demo_directory: Path) -> Iterator[GrammarCompiler]:
    """A compiler for the demo model."""
    compiler = GrammarCompiler(demo_directory, DEMO_VOCAB)
    yield compiler
    compiler.close()
