"""Several stages: the tokens of one rank, and how their engine ends when one of them does."""

from __future__ import annotations

from typing import Any

import transformers

from tests.engine.conftest import SIZES, VOCAB, assert_same_tokens, load, save_model

from .conftest import load_ranks
from .test_ranked_engine import run


def test_first(tmp_path):
    save_model(tmp_path, transformers.LlamaConfig(**SIZES))
    engine: Any = load_ranks(tmp_path, 1, num_stages=2)
    try:
        (_, result), (_, expected) = (run(one, num_logprobs=VOCAB) for one in (engine, load(tmp_path)))
        assert_same_tokens([result], [expected])
    finally:
        engine.close()
