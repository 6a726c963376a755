"""Scales for an fp8 KV pool that fit a model: the largest keys and values that it makes of some text.

The model runs over a pool in its own type, on the CPU or a GPU, and what it left there is looked at: keys as they are stored,
behind their rotation. e4m3 is a floating-point type, so room above the largest costs no digits, but of numbers that are some
thousand times smaller (its normal ones are 1/64 to 448), while a number beyond the range is cut. So there is much room.

Scales are powers of two. Division by one is exact, and a number that is a normal one with and without is rounded to the same. With
other scales each number would be rounded anew, for better or worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path

import torch

from kvrelay.common.errors import ModelError
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.batch import build_batch
from kvrelay.engine.cpu import cpu_ops, why_no_cpu_kernels
from kvrelay.engine.engine_options import EngineOptions, device_of, dtype_of
from kvrelay.engine.interface import StepRow
from kvrelay.engine.kv_pool import KvPool
from kvrelay.engine.kv_scales import FP8_MAX
from kvrelay.engine.model import DecoderModel
from kvrelay.engine.model_config import load_config
from kvrelay.engine.ops import Ops, StepContext
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.weights import Progress, load_weights

# Text that comes later has larger keys than any seen, at worst those of one odd token. This costs three of the 15 powers of two
# that e4m3's normal numbers span.
MARGIN = 8.0
_MIN_EXPONENT = -126  # of normal numbers in fp32


@torch.inference_mode()
def largest_kv(options: EngineOptions, prompts: Seq[Seq[int]], progress: Progress) -> torch.Tensor:
    """The largest magnitudes ``[num_layers, 2, num_kv_heads]`` fp32, on the CPU, of keys and values of ``prompts``.

    ``prompts``: token ids, each at least one and at most the model's ``max_position_embeddings``. ``progress`` hears (tokens done,
    tokens in all). A pool for the longest prompt is taken, in the model's type. Raises ModelError if the model cannot be loaded,
    does not fit the memory, or makes what is no finite number.
    """
    config = load_config(options.model_dir)
    device = device_of(options.device)
    dtype = dtype_of(options.dtype, config.dtype, device, partial(why_no_cpu_kernels, options, config))
    torch.set_num_threads(options.num_threads)
    weights = load_weights(options.model_dir, config, dtype, device, lambda done, total: None)
    max_len, size = max(map(len, prompts)), options.block_size
    pool = KvPool(config, -(-max_len // size), size, dtype, device)
    ops: Ops
    if device.type == "cuda":
        from kvrelay.engine.cuda import cuda_ops  # noqa: PLC0415 - a CPU worker may lack Triton
        from kvrelay.engine.native import triton_driver  # noqa: PLC0415

        triton_driver.use_prebuilt()
        ops = cuda_ops(config, pool, max_len, options, None)
    else:
        ops = cpu_ops(options, config, pool.tensor, max_len, has_int8_weights=False)
    model = DecoderModel(config, weights, ops)
    largest = torch.zeros(config.num_layers, 2, config.num_kv_heads)
    total, done = sum(map(len, prompts)), 0
    for prompt in prompts:
        num_blocks = -(-len(prompt) // size)
        sampling = SamplingParams(max_tokens=1)
        sequence = Sequence("c", 1, list(prompt), len(prompt), sampling, 0.0, block_table=list(range(num_blocks)))
        while sequence.num_uncomputed_tokens:
            count = min(options.max_batched_tokens, sequence.num_uncomputed_tokens)
            batch = build_batch([StepRow(sequence, count)], size)
            model.forward(ops.upload((batch.token_ids,))[0], _Checked(ops.begin_step(batch), options.model_dir))
            sequence.num_computed_tokens += count
            done += count
            progress(done, total)
        # What a longer prompt left behind this one's end was looked at before.
        for layer in range(config.num_layers):
            of_layer = pool.tensor[:num_blocks, layer].abs().amax(dim=(0, 3, 4)).float().cpu()
            largest[layer] = torch.maximum(largest[layer], of_layer)
    return largest


class _Checked:
    """A step's operations, and a look at keys and values before they are stored: on the CPU as 0 if they are no numbers.

    Implements :class:`kvrelay.engine.ops.StepContext`.
    """

    def __init__(self, step: StepContext, model_dir: Path) -> None:
        self._step = step
        self._model_dir = model_dir

    def rotary_kv_write(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """See StepContext. Raises ModelError."""
        if not bool(key.isfinite().all() & value.isfinite().all()):
            raise ModelError(
                f"{self._model_dir}: keys or values of layer {layer} are no finite numbers in {key.dtype}: fetch a sound checkpoint"
            )
        return self._step.rotary_kv_write(query, key, value, layer)

    def attention(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """See StepContext."""
        return self._step.attention(query, layer)


def scales_for(largest: torch.Tensor) -> torch.Tensor:
    """``largest`` x ``MARGIN`` / 448, rounded up to a power of two, in fp32; 1 for heads that are 0 throughout. None is 0."""
    exponents = [math.frexp(value * MARGIN / FP8_MAX)[1] for value in largest.flatten().tolist()]
    powers = torch.tensor([math.ldexp(1.0, max(exponent, _MIN_EXPONENT)) for exponent in exponents])
    return torch.where(largest > 0, powers.view_as(largest), 1.0)
