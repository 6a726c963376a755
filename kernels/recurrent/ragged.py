"""A step's tokens as recurrent layers see them: sequences of any lengths, whose states stand in blocks of the pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.kernels.checks import require_dtype, require_int32, require_shape


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
