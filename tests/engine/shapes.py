"""The smallest shape of a model, for tests of operations that make no step."""

from __future__ import annotations

from kvrelay.engine.config.model import ModelShape

ONE_LAYER = ModelShape(
    architecture="Tiny",
    vocab_size=1,
    num_layers=1,
    num_q_heads=1,
    num_kv_heads=1,
    head_dim=1,
    max_position_embeddings=1,
    sliding_windows=(None,),
    dtype="float32",
    rope_text="",
)
