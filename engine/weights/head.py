"""Loads an EAGLE-3 head's weights from its safetensors files."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.head import HeadConfig
from kvrelay.engine.weights.headers import TensorHeader, check_full, read_headers
from kvrelay.engine.weights.parameters import HeadWeights, MlpWeights
from kvrelay.engine.weights.reader import CheckpointReader

_EMBED, _OFFSETS, _MASK = "embed_tokens.weight", "d2t", "t2d"


@dataclass(frozen=True, slots=True)
class DraftHeadWeights:
    """All weights of a head. ``hidden`` is its own size, which may differ from the model's."""

    fuse: torch.Tensor  # [hidden, number of taps * the model's hidden size]
    embed_norm: torch.Tensor  # [hidden]
    hidden_norm: torch.Tensor
    attention: HeadWeights  # its first product takes both, normed: [.., 2 * hidden]
    post_norm: torch.Tensor
    mlp: MlpWeights
    norm: torch.Tensor
    lm_head: torch.Tensor  # [draft_vocab, hidden]
    token_ids: torch.Tensor  # [draft_vocab] int64, ids in the model's vocabulary
    embed: torch.Tensor | None  # [vocab, hidden]; None: the model's


def load_head_weights(
    directory: Path, config: HeadConfig, dtype: torch.dtype, device: torch.device
) -> DraftHeadWeights:
    """Raises ModelError as ``head_headers``, or if the head is for another vocabulary."""
    headers = head_headers(directory, config)
    layer, vocab_size = _layer(headers), config.layer.vocab_size
    with CheckpointReader(headers, None, dtype) as reader:

        def read(*names: str) -> torch.Tensor:
            return torch.cat([reader.read(name) for name in names]).to(device, dtype)

        def projections(prefix: str, *names: str) -> torch.Tensor:
            return read(*(f"{layer}{prefix}.{name}_proj.weight" for name in names))

        token_ids = torch.arange(config.draft_vocab_size)
        if _OFFSETS in headers:
            token_ids += reader.read(_OFFSETS).long()
        found = set(token_ids.tolist())
        if len(found) < len(token_ids) or min(found) < 0 or max(found) >= vocab_size:
            raise ModelError(
                f"{headers[_OFFSETS].path}: {_OFFSETS} names tokens twice, or beyond the model's {vocab_size}"
            )
        return DraftHeadWeights(
            fuse=read("fc.weight"),
            embed_norm=read(f"{layer}input_layernorm.weight"),
            hidden_norm=read(f"{layer}hidden_norm.weight"),
            attention=HeadWeights(
                projections("self_attn", "q", "k", "v"), None, None, None, None, projections("self_attn", "o"), None
            ),
            post_norm=read(f"{layer}post_attention_layernorm.weight"),
            mlp=MlpWeights(projections("mlp", "gate", "up"), None, projections("mlp", "down"), None),
            norm=read("norm.weight"),
            lm_head=read("lm_head.weight"),
            token_ids=token_ids.to(device),
            embed=read(_EMBED) if has_embedding(headers) else None,
        )


def head_headers(directory: Path, config: HeadConfig) -> dict[str, TensorHeader]:
    """The head's tensors by name, without their numbers.

    Raises ModelError naming the file and the tensor if one is missing, unknown, or of another shape.
    """
    headers = read_headers(directory)
    shapes = _shapes(config, _layer(headers))
    vocab_size, hidden = config.layer.vocab_size, config.layer.hidden_size
    optional = {_EMBED: (vocab_size, hidden), _MASK: (vocab_size,), _OFFSETS: (config.draft_vocab_size,)}
    needed = set(shapes)
    if config.draft_vocab_size < vocab_size:
        needed.add(_OFFSETS)
    if hidden != config.target_hidden_size:
        needed.add(_EMBED)
    if missing := sorted(needed - headers.keys()):
        raise ModelError(f"{directory}: the head lacks tensor {missing[0]}, and {len(missing) - 1} others")
    for name, header in sorted(headers.items()):
        if (shape := {**shapes, **optional}.get(name)) is None:
            raise ModelError(f"{header.path}: tensor {name} is unknown; EAGLE-3 heads of one Llama layer have none")
        if header.shape != shape:
            raise ModelError(
                f"{header.path}: tensor {name} has shape {list(header.shape)}; config.json and the model ask for {list(shape)}"
            )
    check_full({name: header for name, header in headers.items() if name in shapes})
    return headers


def has_embedding(headers: Collection[str]) -> bool:
    """Whether a head with these tensors has its own embedding."""
    return _EMBED in headers


def _layer(headers: Collection[str]) -> str:
    """What the names of the layer's tensors begin with."""
    return "layers.0." if any(name.startswith("layers.0.") for name in headers) else "midlayer."


def _shapes(config: HeadConfig, layer: str) -> dict[str, tuple[int, ...]]:
    sizes = config.layer
    hidden, mid = sizes.hidden_size, sizes.intermediate_size
    vectors = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return {
        **{f"{layer}{name}.weight": (hidden,) for name in vectors},
        f"{layer}self_attn.q_proj.weight": (sizes.q_size, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": (sizes.kv_size, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": (sizes.kv_size, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, sizes.q_size),
        f"{layer}mlp.gate_proj.weight": (mid, hidden),
        f"{layer}mlp.up_proj.weight": (mid, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, mid),
        "fc.weight": (hidden, len(config.taps) * config.target_hidden_size),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
