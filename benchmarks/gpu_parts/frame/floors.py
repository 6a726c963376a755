"""The best possible times: bytes or operations, over the rates that were measured on this device in the same run.

Every input is read once and every output written once. A multiplication and an addition count as two operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_parts.frame.sizes import ExpertShape, ModelShape


@dataclass(frozen=True, slots=True)
class Limits:
    """The device's best rates, measured in the same run."""

    copy_bytes_per_s: float  # device to device, bytes read plus bytes written
    matmul_flops_per_s: float  # bf16, a large product of random numbers
    to_host_bytes_per_s: float  # device to pinned memory
    to_device_bytes_per_s: float  # pinned memory to device

    def bytes_s(self, nbytes: float) -> float:
        """Seconds to move ``nbytes`` bytes of device memory."""
        return nbytes / self.copy_bytes_per_s

    def flops_s(self, flops: float) -> float:
        """Seconds for ``flops`` operations."""
        return flops / self.matmul_flops_per_s


def decode_attention_bytes(shape: ModelShape, batch: int, context: int, itemsize: int | None = None) -> int:
    """Bytes of one layer's decode attention: all keys and values, the queries, the output.

    ``itemsize``: bytes of an element in the pool, if not the model's.
    """
    kv_bytes = shape.kv_bytes_per_token_and_layer * (itemsize or shape.itemsize) // shape.itemsize
    return batch * (context * kv_bytes + 2 * shape.num_q_heads * shape.head_dim * shape.itemsize)


def linear_bytes(num_rows: int, num_outs: int, num_ins: int, weight_itemsize: float) -> int:
    """Bytes of a product: the weight, and input and output rows in 16 bits."""
    return round(num_outs * num_ins * weight_itemsize) + 2 * num_rows * (num_ins + num_outs)


def experts_bytes(shape: ExpertShape, num_tokens: int, num_read: int, itemsize: int) -> int:
    """Bytes of a layer of experts: the weights of the ``num_read`` experts that have rows, and input and output rows."""
    weights = num_read * 3 * shape.hidden_size * shape.intermediate_size
    return itemsize * (weights + 2 * num_tokens * shape.hidden_size)


def stored_itemsize(group_size: int, scale_itemsize: int) -> float:
    """Bytes of a 4-bit weight in a checkpoint, with its share of its group's scale."""
    return 0.5 + scale_itemsize / group_size


def prefill_attention_flops(shape: ModelShape, new: int, cached: int) -> int:
    """Operations of one layer's causal attention. A query sees itself, the cached tokens, and the new tokens before it."""
    num_pairs = new * cached + new * (new + 1) // 2
    return 4 * shape.num_q_heads * shape.head_dim * num_pairs


def decode_step_bytes(shape: ModelShape, batch: int, context: int, layer_itemsize: float | None = None) -> int:
    """Bytes of a decode step: all matrices once (only ``batch`` rows of the embedding), and all keys and values.

    ``layer_itemsize``: bytes of a layer's weight element, if not the model's.
    """
    weights = (shape.num_head_weights + batch * shape.hidden_size) * shape.itemsize
    weights += round(shape.num_layer_weights * (layer_itemsize or shape.itemsize))
    return weights + batch * context * shape.kv_bytes_per_token


def prefill_flops(shape: ModelShape, num_tokens: int) -> int:
    """Operations of one prompt: all layers for every token, the head for the last token, and attention."""
    products = 2 * (num_tokens * shape.num_layer_weights + shape.num_head_weights)
    return products + shape.num_layers * prefill_attention_flops(shape, num_tokens, 0)
