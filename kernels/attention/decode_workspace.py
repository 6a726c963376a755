"""The buffers between the kernels of split attention, and how many splits and batch sizes a device gets.

All attention of single tokens uses them: by heads (`decode`) and over latents (`latent`). `splits` says how a batch is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.kernels.attention.splits import combined_splits, decode_combine_kernel, most_splits
from kvrelay.kernels.checks import next_power_of_2, require_shape

MIN_SEQS = 16  # sequences of the smallest batch that a kernel is compiled for
_PROGRAMS_PER_MULTIPROCESSOR = 3


@dataclass(frozen=True)
class DecodeWorkspace:
    """Buffers of `paged_decode_attention`, owned by the caller and overwritten by every call.

    One workspace serves all layers, and all batches of up to `max_seqs` sequences, of one stream.
    """

    partial_out: torch.Tensor  # [most_splits(max_seqs, max_splits), num_q_heads, head_dim] fp32
    partial_lse: torch.Tensor  # [most_splits(max_seqs, max_splits), num_q_heads] fp32, base 2
    plan: torch.Tensor  # [max_seqs, 2] int32: first split and number of splits per sequence, for the second kernel
    arrivals: torch.Tensor  # [max_seqs, num_q_heads] int32: finished splits per program of a split; 0 between calls
    max_splits: int  # most splits of a sequence that decodes alone

    @classmethod
    def allocate(
        cls,
        max_seqs: int,
        num_q_heads: int,
        head_dim: int,
        max_splits: int,
        device: torch.device | str,
    ) -> DecodeWorkspace:
        """Allocates buffers on `device`; only the counters are initialised.

        `max_splits` is the number of splits that run at once, a wave. Each split is one program per KV head. `splits_for_device`
        gives the number. A batch is cut so that its last wave, too, keeps the memory busy.

        Raises:
            ValueError: max_splits < 1.
        """
        if max_splits < 1:
            raise ValueError(f"max_splits is {max_splits}, expected >= 1")
        shape = (most_splits(max_seqs, max_splits), num_q_heads)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty((max_seqs, 2), dtype=torch.int32, device=device),
            torch.zeros((max_seqs, num_q_heads), dtype=torch.int32, device=device),
            max_splits,
        )

    def require_room(self, num_seqs: int, num_q_heads: int, head_dim: int) -> None:
        """Raise ValueError unless the workspace is for so many heads of values of `head_dim`, and at least `num_seqs` sequences."""
        max_seqs = self.plan.shape[0]
        bound = most_splits(max_seqs, self.max_splits)
        require_shape("partial_out", self.partial_out, (bound, num_q_heads, head_dim))
        require_shape("partial_lse", self.partial_lse, (bound, num_q_heads))
        if num_seqs > max_seqs:
            raise ValueError(f"{num_seqs} sequences, the workspace holds {max_seqs}")

    def combine(self, seq_lens: torch.Tensor, out: torch.Tensor) -> None:
        """Write what the splits of each sequence have together into `out` `[num_seqs, num_q_heads, head_dim]`; one launch."""
        num_seqs, num_q_heads, head_dim = out.shape
        head_dim_pad = next_power_of_2(head_dim)
        decode_combine_kernel[(num_seqs, num_q_heads)](
            self.partial_out,
            self.partial_lse,
            self.plan,
            seq_lens,
            out,
            out.stride(0),
            out.stride(1),
            NUM_Q_HEADS=num_q_heads,
            HEAD_DIM=head_dim,
            HEAD_DIM_PAD=head_dim_pad,
            SPLITS=combined_splits(1, head_dim_pad),
            num_warps=2 if head_dim_pad <= 256 else 4,
        )


def splits_for_device(num_multiprocessors: int, num_kv_heads: int) -> int:
    """The `max_splits` of a device: the splits that run at once. A multiprocessor of Hopper or Blackwell holds three programs."""
    return max(1, _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // num_kv_heads)


def decode_batch_sizes(max_seqs: int) -> list[int]:
    """The largest batch size of each compiled kernel, up to `max_seqs`. A kernel serves all batches above the size before it."""
    sizes = [min(MIN_SEQS, max_seqs)]
    while sizes[-1] < max_seqs:
        sizes.append(min(2 * sizes[-1], max_seqs))
    return sizes
