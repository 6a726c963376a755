"""A step's tokens as recurrent layers see them: sequences of any lengths, whose states stand in blocks of the pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvrelay.kernels.checks import FLOAT_DTYPES, require_dtype, require_int32, require_shape, require_unit_stride


@dataclass(frozen=True, slots=True)
class RaggedStates:
    """Sequence by sequence, the tokens of a step in parts. Behind each part the state is stored."""

    seqs: torch.Tensor  # [num_tokens] int32, the sequence of each token
    token_starts: torch.Tensor  # [num_parts + 1] int32, the first token of each part
    part_starts: torch.Tensor  # [num_seqs + 1] int32, the first part of each sequence
    read: torch.Tensor  # [num_seqs] int64, the blocks with the states before the step
    is_new: torch.Tensor  # [num_seqs] bool: a sequence begins, with a state of zeros; its ``read`` may be any block
    write: (
        torch.Tensor
    )  # [num_parts] int64, the blocks for the states behind the parts; only a first part's may be the one read

    @property
    def num_tokens(self) -> int:
        """Those of all sequences."""
        return len(self.seqs)

    @property
    def num_parts(self) -> int:
        """Those of all sequences."""
        return len(self.write)

    @property
    def num_seqs(self) -> int:
        """At most as many as parts."""
        return len(self.read)

    def require(self) -> None:
        """Raise ValueError unless shapes and dtypes are as above, and numbers lie next to each other."""
        require_shape("seqs", self.seqs, ("num_tokens",))
        require_shape("write", self.write, ("num_parts",))
        require_shape("read", self.read, ("num_seqs",))
        require_shape("is_new", self.is_new, (self.num_seqs,))
        require_shape("token_starts", self.token_starts, (self.num_parts + 1,))
        require_shape("part_starts", self.part_starts, (self.num_seqs + 1,))
        require_int32(seqs=self.seqs, token_starts=self.token_starts, part_starts=self.part_starts)
        for name, blocks in (("read", self.read), ("write", self.write)):
            require_dtype(name, blocks, torch.int64)
            if not blocks.is_contiguous():
                raise ValueError(f"{name} has stride {blocks.stride(0)}, expected 1")
        require_dtype("is_new", self.is_new, torch.bool)


def require_recurrence(
    mixed: torch.Tensor,
    of_tokens: Mapping[str, torch.Tensor],
    of_heads: Mapping[str, torch.Tensor],
    pool: torch.Tensor,
    states: RaggedStates,
    *,
    value_size: int,
    key_size: int,
) -> int:
    """The number of keys in `mixed`, which has a value for each head, as many queries as keys, and nothing else.

    Raises ValueError unless `pool`, `[num_blocks, num_heads, …, …]`, is fp32 with contiguous blocks, `of_tokens` are `[num_tokens,
    num_heads]`, `of_heads` are `[num_heads]`, and `states` are sound.
    """
    require_dtype("pool", pool, torch.float32)
    num_heads, num_rows, num_columns = pool.shape[1:]
    if pool.stride()[1:] != (num_rows * num_columns, num_columns, 1):
        raise ValueError(f"pool has strides {pool.stride()}, expected contiguous blocks")
    require_shape("mixed", mixed, (states.num_tokens, "size"))
    num_keys, rest = divmod(mixed.shape[1] - num_heads * value_size, 2 * key_size)
    if num_keys < 1 or rest or num_heads % num_keys:
        raise ValueError(
            f"mixed has {mixed.shape[1]} numbers per token, expected {num_heads} values of {value_size}, and as many queries as "
            f"keys of {key_size}, whose number divides that of the values"
        )
    for name, tensor in of_tokens.items():
        require_shape(name, tensor, (states.num_tokens, num_heads))
    for name, tensor in {"mixed": mixed, **of_tokens}.items():
        require_dtype(name, tensor, *FLOAT_DTYPES)
        require_unit_stride(name, tensor)
    for name, tensor in of_heads.items():
        require_shape(name, tensor, (num_heads,))
        require_unit_stride(name, tensor)
    states.require()
    return num_keys


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What a layer with a gated delta rule computes of a step's tokens. All may be strided between tokens."""

    mixed: torch.Tensor  # [num_tokens, 2 * num_key_heads * key_size + num_heads * value_size]: queries, keys, values
    decay: torch.Tensor  # [num_tokens, num_heads]
    beta: torch.Tensor  # [num_tokens, num_heads], before the sigmoid
    log_rates: torch.Tensor  # [num_heads]: a state fades by exp(-exp(log_rate) * softplus(decay + decay_bias))
    decay_bias: torch.Tensor  # [num_heads]


@dataclass(frozen=True, slots=True)
class SpaceInputs:
    """What a layer with a selective state space computes of a step's tokens. All may be strided between tokens."""

    mixed: torch.Tensor  # [num_tokens, num_heads * head_size + 2 * num_keys * state_size]: inputs, keys, queries
    steps: torch.Tensor  # [num_tokens, num_heads]: a time step is softplus(step + step_bias)
    log_rates: torch.Tensor  # [num_heads]: in a step a state fades by exp(-exp(log_rate) * step)
    step_bias: torch.Tensor  # [num_heads]
    skip: torch.Tensor  # [num_heads]: this share of the inputs is added to the output
    limits: tuple[float, float]  # of time steps, in sequences with more than one token in the step
