"""The Llama family's forward pass over a packed ragged batch. No state but weights; K/V live in the pool."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvrelay.engine.model_config import ModelConfig
from kvrelay.engine.ops import Ops, StepContext
from kvrelay.engine.weights import LayerWeights, ModelWeights


class DecoderModel:
    """Runs one step's tokens through all layers."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: Ops) -> None:
        """Takes ``weights`` over: their matrices are replaced, one by one, by what ``ops`` multiplies fastest with."""
        self._config = config
        self._weights = weights
        self._ops = ops
        for layer in weights.layers:
            layer.qkv = ops.pack_linear(layer.qkv)
            layer.o = ops.pack_linear(layer.o)
            layer.gate_up = ops.pack_linear(layer.gate_up)
            layer.down = ops.pack_linear(layer.down)
        weights.lm_head = ops.pack_linear(weights.lm_head)

    def forward(self, token_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Hidden states behind the last norm. ``token_ids`` ``[num_tokens]`` -> ``[num_tokens, hidden]``.

        Side effect: K/V of every token are written into the pool.
        """
        ops, weights = self._ops, self._weights
        residual = F.embedding(token_ids, weights.embed)
        hidden = ops.rms_norm(residual, weights.layers[0].input_norm)
        for index, layer in enumerate(weights.layers):
            hidden = self._attention(hidden, layer, index, step)
            hidden = ops.add_rms_norm(hidden, residual, layer.post_norm)
            gate_up = ops.linear(hidden, layer.gate_up, layer.gate_up_bias)
            hidden = ops.linear(ops.silu_mul(gate_up), layer.down, layer.down_bias)
            is_last = index + 1 == len(weights.layers)
            norm = weights.norm if is_last else weights.layers[index + 1].input_norm
            hidden = ops.add_rms_norm(hidden, residual, norm)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` -> ``[n, vocab]`` fp32. Call it with the rows that sample only."""
        return self._ops.linear(hidden, self._weights.lm_head, None).float()

    def _attention(self, hidden: torch.Tensor, layer: LayerWeights, index: int, step: StepContext) -> torch.Tensor:
        config, ops = self._config, self._ops
        qkv = ops.linear(hidden, layer.qkv, layer.qkv_bias)
        query, key, value = qkv.split_with_sizes((config.q_size, config.kv_size, config.kv_size), dim=-1)
        query = query.view(-1, config.num_q_heads, config.head_dim)
        key = key.view(-1, config.num_kv_heads, config.head_dim)
        value = value.view(-1, config.num_kv_heads, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = ops.rms_norm(query, layer.q_norm), ops.rms_norm(key, layer.k_norm)
        query = step.rotary_kv_write(query, key, value, index)
        attended = step.attention(query, index)
        return ops.linear(attended.flatten(-2), layer.o, layer.o_bias)
