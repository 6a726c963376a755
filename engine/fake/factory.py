"""From settings to a fake engine, without torch."""

from __future__ import annotations

import json
from pathlib import Path

from kvrelay.common.errors import ModelError
from kvrelay.common.model_card import IMAGES_OFF
from kvrelay.engine.fake.engine import FakeEngine, FakePace, fake_card
from kvrelay.engine.fake.images import FakeImageReader
from kvrelay.engine.sampling.processors import load_processors
from kvrelay.engine.settings import DEFAULT_BLOCK_SIZE, FakeSettings, KvSettings, ModelSettings

_FAKE_KV_MB = 64


def make_fake_engine(
    directory: Path, model: ModelSettings, kv: KvSettings, fake: FakeSettings, *, reads_images: bool
) -> FakeEngine:
    """An engine with the vocabulary and limits of the model in ``directory``, whose weights it does not read. Raises ModelError."""
    no_images = "" if reads_images else IMAGES_OFF
    if reads_images and FakeImageReader.of_tokenizer(directory) is None:
        no_images = "the model's tokenizer has no special token for them"
    vocab_size, longest = _sizes(directory)
    block_size = kv.block_size or DEFAULT_BLOCK_SIZE
    num_blocks = kv.num_blocks or (kv.kv_memory_mb or _FAKE_KV_MB) * 2**20 // (block_size * fake.fake_token_bytes)
    card = fake_card(
        num_blocks=max(1, num_blocks),
        block_size=block_size,
        token_nbytes=fake.fake_token_bytes,
        max_model_len=min(longest, model.max_model_len or longest),
        model_id=f"fake-{directory.name}",
        vocab_size=vocab_size,
        processors=tuple(load_processors(model.logits_processors)),  # they are not run, because there are no logits
        no_images=no_images,
    )
    pace = FakePace(step_s=fake.fake_step_ms * 1e-3, token_s=fake.fake_token_us * 1e-6)
    has_adapters = model.adapters is not None
    runs_ahead = model.run_ahead == "on"
    return FakeEngine(card, pace=pace, reads_back_once=True, runs_ahead=runs_ahead, has_adapters=has_adapters)


def _sizes(directory: Path) -> tuple[int, int]:
    """(vocabulary, longest sequence) of the model, read without torch. Raises ModelError."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config |= config.get("text_config") or {}  # of a multimodal model
        return int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path} does not tell vocab_size and max_position_embeddings ({error!r}); name a model's directory"
        ) from error
