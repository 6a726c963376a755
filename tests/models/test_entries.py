"""DeepSeek-V4: layers that keep an entry for 4 or 128 tokens, with sequences that are longer than all windows."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kvrelay.common.errors import ModelError
from kvrelay.common.sampling import BeamSearch
from kvrelay.common.sampling import SamplingParams as Sampling
from kvrelay.engine.config.model import EntrySizes, ModelShape
from kvrelay.engine.kv.entries import EntryPool
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.hf.loading import check_files, load_parameters
from kvrelay.engine.models.hf.parts import candidates
from kvrelay.engine.outline import outline_model
from kvrelay.engine.step.batch import build_batch
from kvrelay.engine.step.plan import PlanRow, StepPlan, TableDelta
from kvrelay.engine.step.slots import Slots
from kvrelay.executor import LLM, SamplingParams
from tests.decode_worker.rig import Rig, greedy
from tests.drafters import Oracle
from tests.e2e.test_model_types import save

from .services import Engines
from .test_states import Failing
from .test_types import NUM_SCARCE_BLOCKS, assert_equal, engine_of
from .tiny import VOCAB, generate

PROMPT = torch.randint(3, 190, (290,), generator=torch.Generator().manual_seed(5)).tolist()
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}  # as published
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A directory with a model that has the rates of published ones, and the model itself."""
    directory = tmp_path_factory.mktemp("published")
    fields = {"compress_rates": RATES, "index_topk": 8, "max_position_embeddings": 1024}
    return directory, save("deepseek_v4", directory, **fields)[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """The same with small rates, and the names of published files."""
    directory = tmp_path_factory.mktemp("small")
    model, path = save("deepseek_v4", directory)[0], directory / "model.safetensors"
    named = {"mtp.0.attn.wq_a.weight": torch.zeros(2, 2)}  # MTP layers are not loaded
    for name, tensor in load_file(path).items():
        as_published = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_").replace("embed_tokens", "embed")
        named[as_published] = tensor
    save_file(named, path, metadata={"format": "pt"})
    return directory, model


def llm_of(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), dtype="float32", threads=1, max_num_seqs=8, max_batched_tokens=96, **options)


def tokens(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    """The output's tokens, and the number of prompt tokens that were cached."""
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    return output.outputs[0].token_ids, output.num_cached_tokens


@pytest.mark.parametrize(
    ("block_size", "cached"),
    [
        (16, (288, 288)),
        pytest.param(20, (280, 300), marks=pytest.mark.full),
        pytest.param(128, (256, 256), marks=pytest.mark.full),
    ],
)
def test_long_prompts_continue_behind_cached_blocks(
    published: tuple[Path, PreTrainedModel], block_size: int, cached: tuple[int, int]
) -> None:
    directory, model = published
    answer = generate(model, PROMPT, 12)[0]
    turn = [*PROMPT, *answer[:11], 5, 6, 7]  # the answer's blocks are cached, too
    with llm_of(directory, block_size=block_size, num_blocks=80) as llm:
        assert tokens(llm, PROMPT) == (answer, 0)
        assert tokens(llm, PROMPT) == (answer, cached[0])
        assert tokens(llm, turn) == (generate(model, turn, 12)[0], cached[1])


def test_guesses_change_no_token(small: tuple[Path, PreTrainedModel]) -> None:
    """Tokens that were guessed wrongly leave rows and entries, which the right ones replace."""
    directory, model = small
    prompts = {"a": PROMPT[:23], "b": PROMPT[40:51]}
    expected = {name: generate(model, prompt, 30)[0] for name, prompt in prompts.items()}
    rig = Rig(engine_of(directory), drafter=Oracle(expected, 2, VOCAB), speculation_tokens=7)
    for name, prompt in prompts.items():
        rig.local(name, prompt, greedy(30))
    assert rig.run() == expected
    assert 10 < rig.drafted("accepted_draft") < rig.drafted() - 5


@pytest.mark.full
def test_a_preempted_beam_search_finds_the_same_beams(small: tuple[Path, PreTrainedModel]) -> None:
    params = Sampling(max_tokens=40, temperature=0.0, beam_search=BeamSearch(width=3, num_return=3))
    engine, prompt = engine_of(small[0], num_blocks=120), PROMPT[:7]
    alone, rig = Rig(engine), Rig(engine)
    alone.local("a", prompt, params)
    rig.local("a", prompt, params)
    for _ in range(9):
        rig.step()
    lease = Owner(OwnerKind.LEASE, "x")
    while rig.num_preemptions == 0 and rig.scheduler.running:
        rig.blocks.release(lease)
        rig.blocks.allocate(lease, rig.blocks.num_allocatable // rig.blocks.num_groups, is_whole=True)
        rig.step()
    rig.blocks.release(lease)
    assert rig.run()["a"] == alone.run()["a"]
    assert rig.num_preemptions == 1


async def test_a_failed_step_is_computed_again(small: tuple[Path, PreTrainedModel]) -> None:
    directory, model = small
    prefill, scarce = Failing(engine_of(directory)), Failing(engine_of(directory, num_blocks=NUM_SCARCE_BLOCKS))
    await assert_equal(Engines(prefill, engine_of(directory), scarce), model)  # type: ignore[arg-type]
    assert min(prefill.num_steps, scarce.num_steps) >= 9


def test_room_without_entries_is_zero() -> None:
    """So that equal tokens have equal bytes, whoever had the blocks before."""
    shape = ModelShape(
        architecture="x", vocab_size=9, num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=8, max_position_embeddings=99,
        sliding_windows=(4,), dtype="float32", rope_text="", entries=(EntrySizes(6, 3),),
    )  # fmt: skip
    pool = KvPool(geometry_of(shape, 4, torch.float32), 8, torch.device("cpu"))
    pool.tensor.fill_(7.0)
    kept = EntryPool(shape, pool.tensor, lambda arrays: list(map(torch.from_numpy, arrays)))
    slots = Slots(1, 4, len(pool.geometry.groups))
    deltas = tuple(TableDelta(0, 0, blocks, group) for group, blocks in enumerate(((6, 1, 3), (0, 2, 4))))
    slots.apply(StepPlan(rows=(), tables=deltas))
    slots.sequences[0].token_ids.extend([1] * 12)
    step = kept.begin_step(build_batch(StepPlan(rows=(PlanRow(0, 0, 7),)), slots, 4))
    step.write_entries(torch.tensor([[1.0, 2.0, 3.0]]), 0)  # ends with token 5, in the second block
    np.testing.assert_array_equal(kept.all_entries[6], 0)
    assert kept.all_entries[1, :3].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(kept.all_entries[1, 3:], 0)
    assert bool((kept.all_entries[3] == 7).all())  # no token of it is computed yet
    assert step.entries(torch.tensor([0]), torch.tensor([0]), 0).tolist() == [[1, 2, 3]]


def test_a_sequence_keeps_few_numbers_for_a_token_and_what_entries_are_made_of(
    published: tuple[Path, PreTrainedModel],
) -> None:
    groups = outline_model(published[0], "auto", 128).geometry.groups
    (entries,) = (group for group in groups if group.window is None)
    # Two layers with an entry and a key of 16 numbers for 4 tokens, two with an entry for 128; rounded up to 16 numbers.
    assert entries.token_nbytes == 4 * 32
    kept = {(group.key_size, group.window) for group in groups if group is not entries}
    # By 4 and 4 numbers a token goes into two entries, and so does its key. An entry is made of 8 tokens, or of 128.
    assert kept == {(16, 8), (128, 8), (32, 128)}


def test_a_weight_that_one_expert_lacks_is_named(small: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    tensors = load_file(small[0] / "model.safetensors")
    lacking = sorted(name for name in tensors if ".experts." in name)[0]
    save_file({name: one for name, one in tensors.items() if name != lacking}, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((small[0] / name).read_bytes())
    with pytest.raises(ModelError, match=f"lacks {re.escape(lacking)}, which other experts have"):
        check_files(tmp_path, torch.float32)


def changed(directory: Path, target: Path, **fields: Any) -> dict[str, torch.Tensor]:
    """Copy a checkpoint with other fields in its config.json. Returns its tensors."""
    shutil.copytree(directory, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    return load_file(target / "model.safetensors")


def test_a_table_that_names_an_expert_that_is_not_there_is_refused(
    small: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    """Otherwise the first request with this token would end a GPU's worker."""
    tensors = changed(small[0], tmp_path / "model")
    tensors["layers.1.ffn.gate.tid2eid"][150, 1] = 4
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\..*sends token 150 to the experts \[\d, 4\], and a layer has 4"):
        engine_of(tmp_path / "model")


def test_float16_is_refused_with_the_way_out(small: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"float16.*choose --dtype bfloat16 or float32"):
        engine_of(small[0], dtype="float16")
    changed(small[0], tmp_path / "model", dtype="float16")
    with pytest.raises(ModelError, match=r"float16.*choose --dtype bfloat16 or float32"):
        outline_model(tmp_path / "model", "auto", 16)


def test_check_model_counts_what_is_loaded(small: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """Tables of experts, and what transformers keeps in float32, too. Of a quantised one most products of compressors stay full."""
    changed(small[0], tmp_path / "full", dtype="bfloat16")
    model = load_parameters(tmp_path / "full", torch.bfloat16, torch.device("cpu"))
    nbytes = outline_model(tmp_path / "full", "auto", 16).gpu_weights_nbytes
    assert nbytes == sum(one.nbytes for one in model.state_dict().values())
    fp8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    changed(small[0], tmp_path / "fp8", dtype="bfloat16", quantization_config=fp8)
    stored = [
        name for name in candidates(model) if ".compressor." not in name or name.endswith("indexer.q_b_proj.weight")
    ]
    less = sum(model.get_parameter(name).numel() for name in stored) * (2 - 8.25 / 8)
    assert outline_model(tmp_path / "fp8", "auto", 16).gpu_weights_nbytes == int(nbytes - less)
