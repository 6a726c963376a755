"""A draft head beside the engine drafts the tokens that plain torch drafts from the model's hidden states. Misfits are
refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence as Seq
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves

from kvrelay.common.errors import ModelError
from kvrelay.engine.backends.heads import head_nbytes
from kvrelay.engine.config.head import load_head_config
from kvrelay.engine.config.model import load_config
from kvrelay.engine.models.draft_head import HeadBesideModel
from kvrelay.engine.step.interface import HeadAsk, StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.engine.weights.head import load_head_weights
from tests.engine.conftest import SIZES, load, save_model, sequence, tokens
from tests.heads import ReferenceHead, change_tensors, save_head

KV_BYTES = 2**22
NUM_SLOTS = 4
BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model")
    save_model(directory, transformers.LlamaConfig(**SIZES))
    return directory


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    directory: Path = tmp_path_factory.mktemp("head")
    save_head(directory, model, num_drafted=66)
    return directory


def engine_of(model: Path, **options: Any) -> TorchEngine:
    return load(model, **{"dtype": "float32", "max_num_seqs": NUM_SLOTS, "block_size": BLOCK_SIZE, **options})


class Texts:
    """Sequences of one engine with random tokens, because a head does not depend on what is sampled."""

    def __init__(self, engine: TorchEngine, head: HeadBesideModel, seed: int) -> None:
        self._leader = Leader(engine)
        self._head = head
        self._draws = random.Random(seed)
        self._num_made = 0

    def begin(self, num_tokens: int) -> Any:
        """A sequence with a prompt and its own blocks."""
        blocks = list(range(self._num_made * 16, self._num_made * 16 + 16))
        text = sequence(tokens(self._num_made, num_tokens), blocks)
        text.request_id = f"r{self._num_made}"
        self._num_made += 1
        return text

    def step(self, texts: Seq[Any], num_tokens: int = 1, num_wrong: int = 0, num_right: int = 0) -> None:
        """Compute ``num_tokens`` of each sequence. After the last token a draft follows, of which the first
        ``num_right`` are accepted."""
        rows = []
        coming = {}
        for text in texts:
            count = min(num_tokens, text.num_uncomputed_tokens)
            coming[text] = tokens(self._draws.randrange(10**6), num_right + 1)
            wrong = tokens(self._draws.randrange(10**6), num_wrong)
            is_last = count == text.num_uncomputed_tokens == 1
            rows.append(StepRow(text, count, draft=(*coming[text][:num_right], *wrong) if is_last else ()))
        self._leader.step(rows)
        for row in rows:
            row.sequence.num_computed_tokens += row.num_tokens + (num_right if row.draft else 0)
            if row.sequence.num_uncomputed_tokens <= 0 or row.draft:
                row.sequence.token_ids += coming[row.sequence][: num_right + 1 if row.draft else 1]

    def drafts(self, texts: Seq[Any], num_tokens: int) -> list[tuple[int, ...]]:
        slots = [self._leader.slot_of(text) for text in texts]
        assert None not in slots
        return self._head.draft(
            [HeadAsk(slot or 0, text.token_ids, num_tokens) for slot, text in zip(slots, texts, strict=True)]
        )


@pytest.mark.parametrize("norms_residual", [False, True])
def test_drafts_are_those_of_plain_torch(model: Path, head: Path, tmp_path: Path, norms_residual: bool) -> None:
    """Prompts in chunks, right and wrong drafts, steps without drafts, and texts of unequal length in one batch."""
    directory = shutil.copytree(head, tmp_path / "head")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "norm_before_residual": norms_residual}))
    engine = engine_of(model)
    texts = Texts(engine, engine.load_head(directory, KV_BYTES), seed=3)
    reference = ReferenceHead(directory, model)
    long, short = texts.begin(23), texts.begin(6)
    texts.step([long, short], 10)
    texts.step([long], 10)
    texts.step([long, short], 3)
    for num_right, num_wrong in ((0, 0), (2, 3), (0, 0), (0, 4), (1, 1)):
        texts.step([long, short], 1, num_wrong, num_right)
        expected = [reference.draft(text.token_ids, 0, 3) for text in (long, short)]
        assert texts.drafts([long, short], 3) == expected
        texts.step([short])
    later = texts.begin(20)  # joins the batch of the other two
    texts.step([later], 15)
    texts.step([later, short, long], 5)
    texts.step([later, short, long])
    assert texts.drafts([later, long], 5) == [reference.draft(text.token_ids, 0, 5) for text in (later, long)]
    for _ in range(30):  # steps without a call of draft
        texts.step([later, long])
    assert texts.drafts([later], 2) == [reference.draft(later.token_ids, 0, 2)]


def test_behind_a_hand_off_it_sees_what_was_computed_here(model: Path, head: Path) -> None:
    """The head uses only tokens computed here, and gives no draft for too few. A new sequence in a slot starts
    afresh."""
    engine = engine_of(model, max_num_seqs=1)
    beside = engine.load_head(head, KV_BYTES)
    texts = Texts(engine, beside, seed=4)
    reference = ReferenceHead(head, model)
    for num_tokens in (40, 25):
        text = texts.begin(num_tokens)
        # Computes the prompt as a prefill worker does, in the same pool.
        elsewhere = Texts(engine_of(model, max_num_seqs=1), beside, seed=5)
        elsewhere._leader.engine.blocks[:] = engine.blocks
        elsewhere.step([text], num_tokens - 1)
        engine.blocks[:] = elsewhere._leader.engine.blocks
        first = text.num_computed_tokens
        for num_here in range(1, 9):
            texts.step([text])
            is_enough = num_here >= 4
            drafts = texts.drafts([text], 2)
            assert drafts == [reference.draft(text.token_ids, first, 2) if is_enough else ()]


def test_a_text_longer_than_its_share_of_the_pool_begins_anew(model: Path, head: Path) -> None:
    engine = engine_of(model, max_num_seqs=1, num_blocks=96)
    beside = engine.load_head(head, 64 * 2 * 2 * 16 * 4)  # 64 tokens
    texts = Texts(engine, beside, seed=6)
    reference = ReferenceHead(head, model)
    text = texts.begin(40)
    texts.step([text], 40)
    firsts = set()
    for _ in range(60):
        texts.step([text])
        (draft,) = texts.drafts([text], 3)
        stretch = beside._stretches[0]
        if draft:
            firsts.add(stretch.first)
            assert draft == reference.draft(text.token_ids, stretch.first, 3)
    assert 0 in firsts
    assert len(firsts) == 2


def test_a_broken_head_costs_no_step(model: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    beside = engine.load_head(head, KV_BYTES)
    texts = Texts(engine, beside, seed=7)
    text = texts.begin(9)
    monkeypatch.setattr(beside._model, "fuse", lambda taps: taps[5])
    for _ in range(12):
        texts.step([text])
    assert text.num_tokens > 9
    assert texts.drafts([text], 2) == [()]


@pytest.mark.parametrize(
    ("config", "tensors", "match"),
    [
        ({"draft_vocab_size": None}, {}, "no 'draft_vocab_size'; it is no EAGLE-3 head"),
        ({"draft_vocab_size": 500}, {}, "drafts 500 of 199 tokens, and the model has 199"),
        ({"vocab_size": 200}, {}, "drafts 66 of 200 tokens, and the model has 199: it is another model's"),
        ({"num_hidden_layers": 2}, {}, "the head has 2 layers"),
        ({"target_hidden_size": 64}, {}, "reads hidden states of 64, and the model has 48"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, {}, "what layers .1, 2, 4. are given, and the model has 3"),
        ({"hidden_act": "gelu"}, {}, "only silu is"),
        ({"intermediate_size": 64}, {}, r"midlayer.mlp.down_proj.weight has shape .48, 128.; .* ask for .48, 64."),
        ({"head_dim": 32}, {}, r"self_attn.k_proj.weight has shape .32, 96.; .* ask for .64, 96."),
        ({}, {"fc.weight": torch.zeros(48, 48)}, r"fc.weight has shape .48, 48.; .* ask for .48, 144."),
        ({}, {"d2t": None}, "lacks tensor d2t, and 0 others"),
        ({}, {"d2t": torch.full((66,), 160)}, "d2t names tokens twice, or beyond the model's 199"),
        ({}, {"d2t": -torch.arange(66)}, "d2t names tokens twice"),
        ({}, {"norm.weight": None, "lm_head.weight": None}, "lacks tensor lm_head.weight, and 1 others"),
        ({}, {"midlayer.self_attn.q_proj.bias": torch.zeros(64)}, "q_proj.bias is unknown"),
        ({}, {"lm_head.weight": torch.zeros(66, 48, dtype=torch.int8)}, "has format I8"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    model: Path, head: Path, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], match: str
) -> None:
    directory = shutil.copytree(head, tmp_path / "head")
    found = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**found, **config}))
    change_tensors(directory, tensors)
    with pytest.raises(ModelError, match=match):
        engine_of(model).load_head(directory, KV_BYTES)


def test_a_truncated_file_and_a_small_pool_are_refused_by_name(model: Path, head: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(head, tmp_path / "head")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read .*it is truncated"):
        engine_of(model).load_head(directory, KV_BYTES)
    path.unlink()
    with pytest.raises(ModelError, match=r"has no model.safetensors"):
        engine_of(model).load_head(directory, KV_BYTES)
    with pytest.raises(ModelError, match="is 0, 24 tokens for each of 4 sequences; guesses need 64: take 1"):
        engine_of(model).load_head(head, 4 * 31 * 2 * 2 * 16 * 4)


def test_what_a_head_takes_is_known_before_it_is_loaded(model: Path, head: Path) -> None:
    config = load_config(model)
    weights = load_head_weights(head, load_head_config(head, config), torch.float32, torch.device("cpu"))
    beside = engine_of(model).load_head(head, KV_BYTES)
    tensors = [one for one in tree_leaves(asdict(weights)) if isinstance(one, torch.Tensor)]
    taken = sum(one.nbytes for one in [*tensors, beside._ring]) + KV_BYTES
    found = [head_nbytes(head, KV_BYTES, config, torch.float32, NUM_SLOTS, is_cut=is_cut) for is_cut in (False, True)]
    assert taken <= found[0] < taken + 1024, "maps of the vocabulary are counted in the model's type"
    assert found[1] - found[0] == config.vocab_size * config.hidden_size * 4, "the model's embedding"


def test_both_forms_of_config_and_names(model: Path, head: Path, tmp_path: Path) -> None:
    """Sizes in ``transformer_layer_config``, tensors named ``layers.0``, and layers named by their output in
    ``eagle_config``."""
    other = shutil.copytree(head, tmp_path / "head")
    config = json.loads((other / "config.json").read_text())
    own = {name: config.pop(name) for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    named = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}
    written = {"draft_vocab_size": own["draft_vocab_size"], "eagle_config": named, "transformer_layer_config": config}
    (other / "config.json").write_text(json.dumps(written))
    tensors = load_file(other / "model.safetensors")
    save_file(
        {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}, other / "model.safetensors"
    )
    expected = []
    for directory in (head, other):
        engine = engine_of(model)
        texts = Texts(engine, engine.load_head(directory, KV_BYTES), seed=8)
        text = texts.begin(12)
        texts.step([text], 12)
        expected.append(texts.drafts([text], 4))
    assert expected[0] == expected[1]
    assert len(expected[0][0]) == 4
