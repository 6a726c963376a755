"""EAGLE-3 heads for tests: random ones, one that predicts a certain model exactly, and a reference in plain torch."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from tests.engine.conftest import SIZES, save_model

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def save_head(directory: Path, model: Path, *, num_drafted: int, taps: Seq[int] = (0, 1, 2), **changed: Any) -> None:
    """Save a random head for the model in ``model`` in an existing directory. It drafts ``num_drafted`` evenly spread
    tokens. ``changed``: fields of its config.json."""
    of_model = json.loads((model / "config.json").read_text())
    vocab_size, hidden = of_model["vocab_size"], of_model["hidden_size"]
    names = ("hidden_size", "vocab_size", "rope_parameters", "num_key_value_heads", "head_dim")
    config = {name: of_model[name] for name in names} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "dtype": "float32",
        "draft_vocab_size": num_drafted,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        **changed,
    }
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    def norm() -> torch.Tensor:
        return torch.rand(hidden, generator=generator) + 0.5

    q_size, kv_size = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    step = vocab_size // num_drafted
    save_file(
        {
            "fc.weight": normal(hidden, len(taps) * hidden),
            "midlayer.input_layernorm.weight": norm(),
            "midlayer.hidden_norm.weight": norm(),
            "midlayer.post_attention_layernorm.weight": norm(),
            "midlayer.self_attn.q_proj.weight": normal(q_size, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": normal(kv_size, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": normal(kv_size, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": normal(hidden, q_size),
            "midlayer.mlp.gate_proj.weight": normal(128, hidden),
            "midlayer.mlp.up_proj.weight": normal(128, hidden),
            "midlayer.mlp.down_proj.weight": normal(hidden, 128),
            "norm.weight": norm(),
            "lm_head.weight": normal(num_drafted, hidden),
            "d2t": torch.arange(num_drafted) * (step - 1),
            "t2d": torch.arange(vocab_size) % step == 0,
        },
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps(config))


def change_tensors(directory: Path, changed: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of a head's file. None removes a tensor."""
    path = directory / "model.safetensors"
    tensors = {**load_file(path), **changed}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def save_known_pair(model: Path, head: Path, mistakes: float = 0.0, **sizes: Any) -> None:
    """Save a model whose layers add nothing, so that its last token alone decides, and a head that predicts it exactly.

    The head's attention selects the token itself, because query and key are equal, and passes on its embedding.
    ``mistakes``: the size of the error added to its output. ``sizes``: other fields of the model.
    """
    save_model(model, transformers.LlamaConfig(**{**SIZES, **WIDE, **sizes}))
    target = transformers.AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    target.save_pretrained(model)
    size, hidden = WIDE["head_dim"], WIDE["hidden_size"]
    save_head(head, model, num_drafted=SIZES["vocab_size"], norm_before_residual=True)
    whole, part = torch.eye(hidden), torch.zeros(hidden, hidden)
    out = torch.zeros(hidden, 4 * size)  # the first query head of each key head
    out[:size, :size] = out[size:, 2 * size : 3 * size] = torch.eye(size)
    keys = torch.cat((3 * whole, part), dim=1)
    generator = torch.Generator().manual_seed(6)
    lm_head = target.lm_head.weight.detach()
    change_tensors(
        head,
        {
            "midlayer.hidden_norm.weight": torch.zeros(hidden),
            "midlayer.input_layernorm.weight": torch.ones(hidden),
            "midlayer.self_attn.q_proj.weight": keys.view(2, size, -1).repeat_interleave(2, 0).flatten(0, 1),
            "midlayer.self_attn.k_proj.weight": keys,
            "midlayer.self_attn.v_proj.weight": torch.cat((whole, part), dim=1),
            "midlayer.self_attn.o_proj.weight": out,
            "midlayer.mlp.down_proj.weight": torch.zeros(hidden, 128),
            "norm.weight": target.model.norm.weight.detach().clone(),
            "lm_head.weight": lm_head + mistakes * torch.randn(lm_head.shape, generator=generator),
        },
    )


class ReferenceHead:
    """The reference for a head's drafts: float32, one text at a time, without caches, blocks and batches."""

    def __init__(self, directory: Path, model: Path) -> None:
        self._weights = load_file(directory / "model.safetensors")
        self._config = json.loads((directory / "config.json").read_text())
        self._target = transformers.AutoModelForCausalLM.from_pretrained(model).eval()

    @torch.inference_mode()
    def draft(self, token_ids: Seq[int], first: int, num_tokens: int) -> tuple[int, ...]:
        """The likeliest ``num_tokens`` tokens after ``token_ids``. The model computed the tokens from ``first`` to the
        last but one."""
        weights = self._weights
        states = self._target(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        taps = self._config["eagle_aux_hidden_state_layer_ids"]
        fused = torch.cat([states[tap][0, first:] for tap in taps], dim=-1) @ weights["fc.weight"].T
        behind = list(token_ids[first + 1 :])
        drafted: list[int] = []
        for _ in range(num_tokens):
            last = self._layer(fused, torch.tensor(behind))[-1:]
            best = int((self._norm(last, "norm") @ weights["lm_head.weight"].T).argmax())
            drafted.append(best + int(weights["d2t"][best]))
            behind.append(drafted[-1])
            fused = torch.cat((fused, last))
        return tuple(drafted)

    def _layer(self, fused: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        """The layer's output at all positions, ``[num_positions, hidden]``."""
        weights, config = self._weights, self._config
        embedded = self._norm(self._target.get_input_embeddings()(behind), "midlayer.input_layernorm")
        normed = self._norm(fused, "midlayer.hidden_norm")
        query, key, value = (
            (torch.cat((embedded, normed), dim=-1) @ weights[f"midlayer.self_attn.{name}_proj.weight"].T)
            .view(len(fused), -1, config["head_dim"])
            .transpose(0, 1)
            for name in "qkv"
        )
        attended = F.scaled_dot_product_attention(
            self._turned(query), self._turned(key), value, is_causal=True, enable_gqa=True
        )
        hidden = normed if config.get("norm_before_residual", False) else fused
        hidden = hidden + attended.transpose(0, 1).flatten(1) @ weights["midlayer.self_attn.o_proj.weight"].T
        normed = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (normed @ weights[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return hidden + (F.silu(gate) * up) @ weights["midlayer.mlp.down_proj.weight"].T

    def _norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(states, states.shape[-1:], self._weights[f"{name}.weight"], self._config["rms_norm_eps"])

    def _turned(self, parts: torch.Tensor) -> torch.Tensor:
        """Rotate ``[num_heads, num_positions, head_dim]`` by the positions' angles."""
        half = parts.shape[-1] // 2
        theta = self._config["rope_parameters"]["rope_theta"]
        angles = torch.arange(parts.shape[1])[:, None] / theta ** (torch.arange(half) / half)
        first, second = parts.chunk(2, dim=-1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )
