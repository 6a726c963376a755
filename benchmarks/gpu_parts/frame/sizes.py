"""All sizes of the measurement: for a GPU, and tiny ones for a dry run of the same code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BLOCK_SIZE = 16  # tokens per KV block, kvrelay's default
BOX_BLOCK_SIZE = 64  # blocks that prefill attention loads as one box


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama model, as in its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    dtype: str  # torch's name, of weights and KV

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return 4 if self.dtype == "float32" else 2

    @property
    def num_layer_weights(self) -> int:
        """Elements of all layers' matrices, which every token is multiplied with."""
        q_size, kv_size = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        """Elements of the head. Only tokens that sample are multiplied with it. The embedding has as many."""
        return self.hidden_size * self.vocab_size

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of a layer's fused matrices."""
        q_size, kv_size = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "QKV": (q_size + 2 * kv_size, self.hidden_size),
            "o": (self.hidden_size, q_size),
            "gate-up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.num_layers * self.kv_bytes_per_token_and_layer

    @property
    def kv_bytes_per_token_and_layer(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize

    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_q_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": self.dtype,
        }


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The sizes of one layer of experts."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int  # experts of a token


@dataclass(frozen=True, slots=True)
class Batching:
    """Requests that are answered together."""

    num_requests: int  # all at once
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """All sizes. Lengths are in tokens."""

    shape: ModelShape
    copy_bytes: int  # size of the copy that measures bandwidth
    matmul_size: int  # rows and columns of the product that measures arithmetic
    flush_bytes: int  # read between repeats, to flush the cache
    check_lens: tuple[int, ...]  # contexts of the attention checks
    check_window: int  # sliding window of these checks
    check_blocks: int  # blocks of their pool; enough on a GPU for offsets over 32 bits
    linear_rows: tuple[int, ...]  # rows of products with 8-bit weights
    fp8_rows: int  # rows of products of fp8 with fp8
    stored_rows: tuple[int, ...]  # rows of products with 4-bit weights
    group_size: int  # inputs that share a scale of 4-bit weights
    experts: ExpertShape
    expert_batches: tuple[int, ...]  # tokens
    expert_checks: tuple[int, ...]  # tokens of their check: a batch for each of the kernels
    check_draws: int  # draws for the check of the sampling distribution
    decode_cells: tuple[tuple[int, int], ...]  # (sequences, context)
    prefill_cells: tuple[tuple[int, int], ...]  # (new tokens, cached tokens before them)
    box_lens: tuple[int, ...]  # prompts of prefill attention over blocks of BOX_BLOCK_SIZE
    steps: tuple[tuple[int, int], ...]  # whole model: (sequences, context)
    num_steps: int  # timed decode steps for each
    prefill_len: int
    prefill_chunks: tuple[int, ...]  # tokens computed in one step; the first is compared with the goal
    sampling_batches: tuple[tuple[int, int], ...]  # (rows, vocabulary)
    batching: Batching
    handoff_len: int  # length of one hand-off
    handoff_rounds: int
    ttft_chunk: int
    ttft_rounds: int
    streams: Batching  # answers that long prompts come beside
    warm_ups: int  # calls before a measurement
    min_repeats: int  # fewest repeats of a measurement
    max_repeats: int


LLAMA_3_8B = ModelShape(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=40960,
    dtype="bfloat16",
)
TINY = ModelShape(
    vocab_size=160,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=512,
    dtype="float32",
)


QWEN3_30B_A3B = ExpertShape(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8)
TINY_EXPERTS = ExpertShape(hidden_size=32, intermediate_size=24, num_experts=8, top_k=2)


def full_sizes() -> Sizes:
    """Sizes for one GPU of 80 GB or more. Cases that do not fit are skipped and named."""
    return Sizes(
        shape=LLAMA_3_8B,
        copy_bytes=4 << 30,
        matmul_size=8192,
        flush_bytes=1 << 30,
        check_lens=(1, 15, 16, 257, 1000, 4097, 8192),
        check_window=300,
        check_blocks=2560,  # of 2 ** 20 elements
        linear_rows=(1, 16, 64),
        fp8_rows=2048,
        stored_rows=(1, 16),
        group_size=128,
        experts=QWEN3_30B_A3B,
        expert_batches=(1, 64),
        expert_checks=(1, 2, 64, 300, 1100),
        check_draws=64 * 128,
        decode_cells=tuple((batch, context) for batch in (1, 16, 64, 256) for context in (1024, 4096, 32768)),
        prefill_cells=(
            (1024, 0),
            (2048, 0),
            (8192, 0),
            (32768, 0),
            (1024, 7168),
            (2048, 30720),
            (8192, 8192),
            (8192, 24576),
        ),
        box_lens=(8192, 32768),
        steps=((1, 1024), (32, 1024), (128, 4096)),
        num_steps=60,
        prefill_len=8192,
        prefill_chunks=(8192, 2048, 512),
        sampling_batches=((64, 128256), (1, 128256)),
        batching=Batching(num_requests=64, input_len=512, output_len=128),
        handoff_len=8192,
        handoff_rounds=5,
        ttft_chunk=2048,
        ttft_rounds=5,
        streams=Batching(num_requests=16, input_len=512, output_len=512),
        warm_ups=3,
        min_repeats=5,
        max_repeats=50,
    )


def dry_sizes() -> Sizes:
    """Sizes for a dry run, which takes seconds on one core and measures nothing."""
    return Sizes(
        shape=TINY,
        copy_bytes=1 << 16,
        matmul_size=32,
        flush_bytes=1 << 12,
        check_lens=(1, 16, 37),
        check_window=7,
        check_blocks=8,
        linear_rows=(1, 3),
        fp8_rows=5,
        stored_rows=(1, 3),
        group_size=32,
        experts=TINY_EXPERTS,
        expert_batches=(1, 3),
        expert_checks=(1, 3, 70, 260),
        check_draws=12,
        decode_cells=((2, 20),),
        prefill_cells=((24, 0), (8, 16)),
        box_lens=(130,),
        steps=((1, 20), (3, 33)),
        num_steps=4,
        prefill_len=64,
        prefill_chunks=(64, 32),
        sampling_batches=((3, 160),),
        batching=Batching(num_requests=3, input_len=16, output_len=4),
        handoff_len=64,
        handoff_rounds=2,
        ttft_chunk=32,
        ttft_rounds=2,
        streams=Batching(num_requests=3, input_len=16, output_len=96),
        warm_ups=1,
        min_repeats=1,
        max_repeats=1,
    )
