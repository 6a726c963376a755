"""The GPU's operations over an fp8 pool and over rounded weights, in Triton's interpreter on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.engine.backends.test_ops_cuda import run_interpreted
from tests.engine.conftest import SIZES, save_model

FP8 = """
import sys
from pathlib import Path

import torch

from kvrelay.engine.config.model import load_config
from kvrelay.engine.backends.cuda.ops import CudaOps
from kvrelay.engine.backends.cuda.inputs import StepInputs

config = load_config(Path(sys.argv[1]))
shape = (8, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim)
pool = torch.zeros(shape).to(torch.float8_e4m3fn)
try:
    CudaOps(config, pool, 64, 4)
except ValueError as error:
    assert "kv_scales is None" in str(error), error
else:
    raise AssertionError("scales were not missed")
torch.manual_seed(0)
inputs = StepInputs(
    torch.tensor([20, 0, 1, 2]), torch.tensor([[52, 0, 1, 2]]), torch.tensor([2, 0]),
    torch.tensor([21, 3], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32), 1, 3,
)
query, key, value = (torch.randn(4, n, config.head_dim) for n in (config.num_q_heads, *[config.num_kv_heads] * 2))
results = []
for kv_scales in (None, torch.full((config.num_layers, 2, config.num_kv_heads), 0.01)):
    own = torch.zeros(shape) if kv_scales is None else pool
    ops = CudaOps(config, own, 64, 4, kv_scales)
    ops.block_tables[:, 2, :2] = torch.tensor([1, 3])
    step = ops.step_of(inputs)
    results.append(step.attention(step.rotary_kv_write(query.clone(), key, value, 0), 0))
# Numbers of three bits behind the point, and their average over the context.
difference = (results[0] - results[1]).abs()
assert difference.max() < 0.3, difference.max()
assert 0 < difference.mean() < 0.04, difference.mean()
assert pool.float().abs().max() > 100, "the scales were not used"
print("close", difference.mean().item())
"""


def test_an_fp8_pool_is_written_and_read_with_its_scales(tmp_path: Path) -> None:
    save_model(tmp_path, transformers.Qwen3Config(**SIZES))
    assert run_interpreted(FP8, tmp_path).startswith("close")


ROUNDED = """
import sys
from pathlib import Path

import torch

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.backends.cuda import linear as linear_cuda
from kvrelay.engine import torch_engine
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.engine.config.model import load_config
from kvrelay.engine.backends.cuda.ops import CudaOps
from kvrelay.engine.weights.rounding import RoundedWeight, Rounding
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.weights.checkpoint import load_weights, weights_digest
from tests.engine.led import batch_of

config, rounding = load_config(Path(sys.argv[1])), Rounding(sys.argv[2])
HALF = torch.float16  # the interpreter multiplies bf16's raw bits
kernel_calls = []
multiply = linear_cuda.weight_only_linear


def counted(hidden, *rest):
    kernel_calls.append(len(hidden))
    return multiply(hidden, *rest)


linear_cuda.weight_only_linear = counted
linear_cuda._SLAB_OUTS = 50  # of 64 and more outputs
linear_cuda.MAX_ROWS = 8


def load(rounding):
    return load_weights(Path(sys.argv[1]), config, HALF, torch.device("cpu"), lambda done, total: None, rounding)


def logits(weights, length):
    shape = (24, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim)
    ops = CudaOps(config, torch.zeros(shape, dtype=HALF), 384, 4)
    model = DecoderModel(config, weights, ops)
    tokens = [(7 * place) % 199 for place in range(length)]
    sequence = Sequence("a", 1, tokens, length, SamplingParams(max_tokens=9), 0.0, block_tables=[list(range(24))])
    batch = batch_of([StepRow(sequence, length)], 16)
    with torch.inference_mode():
        hidden = model.forward(ops.upload((batch.token_ids,))[0], ops.begin_step(batch))
        return model.logits(hidden).float()


for length in (5, 12):
    rounded, by_hand, full = load(rounding), load(rounding), load(None)
    for layer in by_hand.layers:
        for part, name in ((layer.attention, "qkv"), (layer.attention, "o"), (layer.mlp, "gate_up"), (layer.mlp, "down")):
            matrix = getattr(part, name)
            assert isinstance(matrix, RoundedWeight), name
            setattr(part, name, matrix.dequantised().to(HALF))
    ours, wanted, exact = logits(rounded, length), logits(by_hand, length), logits(full, length)
    error, rounding_error = ((one - wanted).norm() / wanted.norm() for one in (ours, exact))
    # What fp16 makes of each layer, far below what the weights' rounding does.
    assert error < 4e-3 and error < 0.5 * rounding_error < 0.2, (length, error, rounding_error)
    print("near", length, error.item(), rounding_error.item())
# The others were too many rows: they went through slabs.
assert kernel_calls == [5] * 4 * config.num_layers, kernel_calls

torch_engine.rounding_of = lambda *about: rounding
torch_engine.cpu_ops = lambda options, *of: CudaOps(*of, options.max_num_seqs)
options = EngineOptions(Path(sys.argv[1]), "tiny", dtype="float16", device="cpu", num_blocks=8)
digest = torch_engine.TorchEngine.load(options, lambda done, total: None).card.layout.weights_digest
assert digest == f"{weights_digest(options.model_dir)}-{rounding.value}", digest
print("told apart")
"""


@pytest.mark.parametrize(
    ("config", "weight_format"), [(transformers.Qwen2Config, "int8"), (transformers.Qwen3Config, "fp8")]
)  # the first has biases
@pytest.mark.full
def test_rounded_weights_give_the_logits_of_the_dequantised_ones(
    tmp_path: Path, config: type[transformers.PretrainedConfig], weight_format: str
) -> None:
    save_model(tmp_path, config(**SIZES))
    said = run_interpreted(ROUNDED, tmp_path, weight_format)
    assert (said.count("near"), said.count("told apart")) == (2, 1)
