"""Models over our Triton kernels, in the interpreter or on a GPU: softcaps, sinks, windows, unequal heads, latents, and
parts of experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kvrelay.common.kv_geometry import first_block
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine import torch_engine, transformers_engine
from kvrelay.engine.backends.cuda.ops import CudaOps, CudaPagedOps
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.hf.gate import probe_layers
from kvrelay.engine.models.hf.model import TransformersModel, shape_of
from kvrelay.engine.models.hf.ranks.cut import cut_model
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine
from tests.engine.led import step

from .test_types import NUM_BLOCKS, again, generate, logprobs, options_of, saved
from .test_types import PROMPTS as ALL_PROMPTS
from .tiny import VOCAB, tiny_model

pytestmark = pytest.mark.long
BLOCK_SIZE = 8  # the smallest that a kernel takes
CHUNK = 6
NUM_TOKENS = 4
PROMPTS = ALL_PROMPTS[1:]
FEW = PROMPTS[::2]  # a part of a chunk, and more than two windows: the interpreter is slow
LAYERS = {  # one of each kind
    "gemma2": ["sliding_attention", "full_attention"],
    "mimo_v2_flash": ["full_attention", "sliding_attention"],
    "deepseek_v4": ["heavily_compressed_attention", "compressed_sparse_attention"],
    "qwen3_next": ["linear_attention", "full_attention"],
}


class Run:
    """Sequences on an engine, stepped as by a scheduler."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.block_size = engine.card.layout.block_size
        self.windows = engine.card.layout.geometry.windows
        num_blocks = NUM_BLOCKS * len(self.windows)
        self._free = list(torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).tolist())
        self.outputs: dict[str, list[SampledToken]] = {}
        for block_id in range(num_blocks):  # an earlier run may have left NaN in blocks
            engine.store.open_write(block_id, 0)[:] = bytes(engine.store.block_nbytes)
            engine.store.close_write(block_id)

    def blocks(self, num_tokens: int) -> list[list[int]]:
        """Unused blocks for ``num_tokens`` tokens, in each group."""
        return [[self._free.pop() for _ in range(-(-num_tokens // self.block_size))] for _ in self.windows]

    def seen(self, sequence: Sequence, group: int) -> list[int]:
        """Indices of the blocks in the next token's window."""
        first = first_block(self.windows[group], sequence.num_computed_tokens, self.block_size)
        return list(range(first, len(sequence.block_tables[group])))

    def spoil(self, sequence: Sequence) -> None:
        """Fill the blocks that left a window with NaN bytes, as they may belong to another sequence by now."""
        for group, table in enumerate(sequence.block_tables):
            for block_id in table[: self.seen(sequence, group)[0]]:
                self.engine.store.open_write(block_id, 0)[:] = b"\xff" * self.engine.store.block_nbytes
                self.engine.store.close_write(block_id)

    def step(self, sequences: list[Sequence]) -> None:
        """One step with a chunk or a token of each sequence."""
        rows = [StepRow(one, min(CHUNK, one.num_uncomputed_tokens)) for one in sequences]
        for row, token in zip(rows, step(self.engine, rows), strict=True):
            row.sequence.num_computed_tokens += row.num_tokens
            self.spoil(row.sequence)
            if token is not None:
                row.sequence.token_ids.append(token.token_id)
                self.outputs.setdefault(row.sequence.request_id, []).append(token)


class Done:
    """A reader that is done at once."""

    is_done = True


def handed_over(sequence: Sequence, source: Run, target: Run) -> Sequence:
    """The sequence on another engine, with copies of the blocks that it still sees."""
    tables = target.blocks(len(sequence.block_tables[0]) * target.block_size)
    moves = [
        (sequence.block_tables[group][index], tables[group][index], group)
        for group in range(len(tables))
        for index in source.seen(sequence, group)
    ]
    for there, here, group in moves:
        read = source.engine.store.open_read(there, group)
        view = read if isinstance(read, memoryview) else read.wait(Done(), 10.0)
        assert view is not None, f"no staging memory for block {there}"
        target.engine.store.open_write(here, group)[:] = view
        target.engine.store.close_write(here)
        source.engine.store.close_read(there)
    moved = Sequence(sequence.request_id, 2, list(sequence.token_ids), sequence.num_prompt_tokens, sequence.sampling, 0.0,
                     block_tables=tables)  # fmt: skip
    moved.num_computed_tokens = sequence.num_computed_tokens
    return moved


def relayed(prefill: Run, decode: Run, prompts: list[list[int]] = PROMPTS) -> Iterator[list[SampledToken]]:
    """``NUM_TOKENS`` tokens of each prompt: the first two from one engine, the others from another."""
    params = SamplingParams(max_tokens=100, temperature=0.0, num_logprobs=VOCAB)
    waiting = [
        Sequence(
            str(index), 1, list(prompt), len(prompt), params, 0.0, block_tables=prefill.blocks(len(prompt) + NUM_TOKENS)
        )
        for index, prompt in enumerate(prompts)
    ]
    computing: list[Sequence] = []
    decoding: list[Sequence] = []
    while waiting or computing:  # sequences start one after another, so that chunks and single tokens share steps
        computing += waiting[:1]
        waiting = waiting[1:]
        prefill.step(computing)
        done = [one for one in computing if len(one.token_ids) == one.num_prompt_tokens + 2]
        decoding += [handed_over(one, prefill, decode) for one in done]
        computing = [one for one in computing if one not in done]
    while decoding:
        decode.step(decoding)
        decoding = [one for one in decoding if len(one.token_ids) < one.num_prompt_tokens + NUM_TOKENS]
    for index in range(len(prompts)):
        yield prefill.outputs[str(index)] + decode.outputs[str(index)]


@pytest.mark.full
@pytest.mark.timeout(600)  # the interpreter takes ten seconds for each on a quiet machine
@pytest.mark.parametrize("model_type", LAYERS)
@pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
def test_kernels_compute_what_transformers_does(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at load over kernels has a test with adapters (``test_transformers_adapters.py``)."""
    layer_types = LAYERS[model_type]
    model = saved(model_type, tmp_path, layer_types=layer_types, num_hidden_layers=len(layer_types))
    is_cuda = torch.cuda.is_available()
    if not is_cuda:
        monkeypatch.setattr(transformers_engine, "_ops_on", lambda *_: CudaPagedOps)
    options = {"block_size": BLOCK_SIZE, "device": "cuda" if is_cuda else "cpu"}
    engines = [again(tmp_path, **options) for _ in range(2)]
    assert_equal(engines, model)


@pytest.mark.timeout(120)  # the interpreter takes two to four seconds on a quiet machine
@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", *(pytest.param(name, marks=pytest.mark.full) for name in ("glm_moe_dsa", "mistral4"))]
)
@pytest.mark.filterwarnings("ignore")
def test_kernels_over_latents_compute_what_transformers_does(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a dense layer, and one of experts; glm_moe_dsa has layers that share what others picked
    model = saved(model_type, tmp_path, **({} if model_type == "glm_moe_dsa" else {"num_hidden_layers": 2}))
    is_cuda = torch.cuda.is_available()
    if not is_cuda:
        monkeypatch.setattr(torch_engine, "cpu_ops", lambda options, *of: CudaOps(*of, options.max_num_seqs))
    options = options_of(tmp_path, block_size=BLOCK_SIZE, device="cuda" if is_cuda else "cpu")
    assert_equal([TorchEngine.load(options, lambda *_: None) for _ in range(2)], model)


@pytest.mark.full
@torch.inference_mode()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["glm4_moe", "aria_text"])  # the matrices of the second one are transposed
def test_kernels_add_up_experts_of_ranks_with_odd_columns(model_type: str) -> None:
    """Of 37 columns one rank has 18 and one 19."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden, factors = torch.randn(5, 64, device=device), torch.rand(5, 2, device=device)
    expert_ids = torch.randint(4, (5, 2), device=device)

    def experts(cut: Cut | None) -> torch.Tensor:
        sizes = {"moe_intermediate_size": 37, "intermediate_size": 37, "num_hidden_layers": 2}
        model = tiny_model(model_type, **sizes).to(device)
        model.set_experts_implementation("eager")  # transformers' default takes no 37 columns
        if cut is not None:
            layers = probe_layers(model)
            part, _ = cut_model(TransformersModel(model, layers, shape_of(model, layers, torch.float32)), cut)
            pool = KvPool(geometry_of(part.shape, BLOCK_SIZE, torch.float32), 1, device)
            part.bind(CudaPagedOps(part.shape, pool.tensor, BLOCK_SIZE, 1), torch.float32)
        found: torch.Tensor = model.get_submodule("model.layers.1.mlp.experts")(hidden, expert_ids, factors)
        return found

    torch.testing.assert_close(experts(Cut(0, 2)) + experts(Cut(1, 2)), experts(None), atol=1e-4, rtol=1e-4)


def assert_equal(engines: list[TorchEngine], model: PreTrainedModel) -> None:
    """Check that the tokens of both engines, and their log probabilities, equal those of ``generate``."""
    outputs = relayed(*map(Run, engines), FEW)
    for prompt, tokens in zip(FEW, outputs, strict=True):
        expected, expected_logprobs = generate(model, prompt, NUM_TOKENS)
        assert [token.token_id for token in tokens] == expected
        torch.testing.assert_close(torch.stack(list(map(logprobs, tokens))), expected_logprobs, atol=2e-4, rtol=2e-4)
