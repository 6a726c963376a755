"""An EAGLE-3 head that has memorised some texts of a model, to measure the cost of drafting and the gain of correct drafts.

It is trained here, in a minute, on the very texts that are drafted afterwards. So it does not show how often a real head is right.
It does show the cost of asking a head and of checking its drafts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

_NUM_STEPS, _RATE = 100, 1e-3
_NUM_UNROLLED = (
    3  # draft tokens in training, each after the head's own states for the previous ones (Li et al. 2025, section 3)
)
_NUM_DRAFTED = 1024  # size of the draft vocabulary, at least: the texts' tokens, and some more
_LAYER = "midlayer."

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and of what the model wrote behind it."""


def save_known_head(model: Path, directory: Path, texts: Sequence[Text]) -> None:
    """Train a head of the Llama in ``model`` on the answers in ``texts``, and write it to the new ``directory``.

    Answers of one token are skipped.
    """
    target = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    head = _Head(target, sorted({token for prompt, answer in texts for token in (*prompt, *answer)}))
    stretches = [head.stretch(text) for text in texts if len(text[1]) > 1]
    optimizer = torch.optim.Adam(head.weights.values(), lr=_RATE)
    order = torch.Generator().manual_seed(1)
    for _ in range(_NUM_STEPS):
        optimizer.zero_grad()
        for index in torch.randperm(len(stretches), generator=order)[:8].tolist():
            torch.autograd.backward(head.loss(*stretches[index]))
        optimizer.step()
    head.save(directory)


class _Head:
    """Sizes as in the model, but a smaller MLP. Initially it passes on the input of the model's last layer."""

    def __init__(self, target: transformers.PreTrainedModel, drafted: list[int]) -> None:
        config = target.config
        self._target, self._config = target, config
        others = [token for token in range(config.vocab_size) if token not in set(drafted)]
        self.drafted = torch.tensor(sorted([*drafted, *others[: max(0, _NUM_DRAFTED - len(drafted))]]))
        self._place = torch.full((config.vocab_size,), -100).index_put((self.drafted,), torch.arange(len(self.drafted)))
        self.taps = [config.num_hidden_layers // 3, 2 * config.num_hidden_layers // 3, config.num_hidden_layers - 1]
        hidden, size = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_attention_heads * size, config.num_key_value_heads * size
        generator = torch.Generator().manual_seed(0)

        def random(outputs: int, inputs: int) -> torch.Tensor:
            return torch.randn((outputs, inputs), generator=generator).mul_(0.5 / inputs**0.5)

        begun = {
            "fc.weight": torch.cat((torch.zeros(hidden, 2 * hidden), torch.eye(hidden)), dim=1),
            **{f"{_LAYER}{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "hidden_norm")},
            f"{_LAYER}post_attention_layernorm.weight": torch.ones(hidden),
            f"{_LAYER}self_attn.q_proj.weight": random(q_size, 2 * hidden),
            f"{_LAYER}self_attn.k_proj.weight": random(kv_size, 2 * hidden),
            f"{_LAYER}self_attn.v_proj.weight": random(kv_size, 2 * hidden),
            f"{_LAYER}self_attn.o_proj.weight": random(hidden, q_size),
            f"{_LAYER}mlp.gate_proj.weight": random(hidden, hidden),
            f"{_LAYER}mlp.up_proj.weight": random(hidden, hidden),
            f"{_LAYER}mlp.down_proj.weight": random(hidden, hidden),
            "norm.weight": target.get_decoder().norm.weight.detach().clone(),
            "lm_head.weight": target.get_output_embeddings().weight.detach()[self.drafted].clone(),
        }
        self.weights = {name: tensor.requires_grad_() for name, tensor in begun.items()}

    @torch.no_grad()
    def stretch(self, text: Text) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The training data after a prompt that was cached or handed over: taps, the next tokens, and the tokens after those."""
        prompt, answer = text
        token_ids = torch.tensor([*prompt, *answer])
        states = self._target(token_ids[None], output_hidden_states=True, use_cache=False).hidden_states
        taps = torch.cat([states[tap][0] for tap in self.taps], dim=-1)
        first = len(prompt) - 1
        return taps[first:-2], token_ids[first + 1 : -1], self._place[token_ids][first + 2 :]

    def loss(self, taps: torch.Tensor, behind: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of drafts from every position."""
        embedded = self._norm(self._target.get_input_embeddings()(behind).detach(), f"{_LAYER}input_layernorm")
        fused, total = taps @ self.weights["fc.weight"].T, torch.zeros(())
        for _ in range(_NUM_UNROLLED):
            out = self._layer(fused, embedded)
            logits = self._norm(out, "norm") @ self.weights["lm_head.weight"].T
            total = total + F.cross_entropy(logits, labels)
            fused = torch.cat((fused[:1], out[:-1]))
        return total

    def save(self, directory: Path) -> None:
        """Write it in the format of EAGLE-3's authors."""
        directory.mkdir()
        names = (
            "hidden_size", "vocab_size", "rope_parameters", "num_attention_heads", "num_key_value_heads", "head_dim",
            "max_position_embeddings", "rms_norm_eps",
        )  # fmt: skip
        config = {name: getattr(self._config, name) for name in names} | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "intermediate_size": self._config.hidden_size,
            "draft_vocab_size": len(self.drafted),
            "eagle_aux_hidden_state_layer_ids": self.taps,
            "dtype": "float32",
        }
        (directory / "config.json").write_text(json.dumps(config))
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.weights.items()}
        tensors["d2t"] = self.drafted - torch.arange(len(self.drafted))
        tensors["t2d"] = self._place >= 0
        save_file(tensors, directory / "model.safetensors")

    def _layer(self, fused: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        weights, size = self.weights, self._config.head_dim
        inputs = torch.cat((embedded, self._norm(fused, f"{_LAYER}hidden_norm")), dim=-1)
        query, key, value = (
            (inputs @ weights[f"{_LAYER}self_attn.{name}_proj.weight"].T).view(len(fused), -1, size).transpose(0, 1)
            for name in "qkv"
        )
        attended = F.scaled_dot_product_attention(
            self._turned(query), self._turned(key), value, is_causal=True, enable_gqa=True
        )
        hidden = fused + attended.transpose(0, 1).flatten(1) @ weights[f"{_LAYER}self_attn.o_proj.weight"].T
        normed = self._norm(hidden, f"{_LAYER}post_attention_layernorm")
        gate, up = (normed @ weights[f"{_LAYER}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return torch.addmm(hidden, F.silu(gate) * up, weights[f"{_LAYER}mlp.down_proj.weight"].T)

    def _norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(states, states.shape[-1:], self.weights[f"{name}.weight"], self._config.rms_norm_eps)

    def _turned(self, parts: torch.Tensor) -> torch.Tensor:
        """``parts`` ``[num_heads, num_places, head_dim]`` with rotary embedding by position."""
        half = parts.shape[-1] // 2
        theta = self._config.rope_parameters["rope_theta"]
        angles = torch.arange(parts.shape[1])[:, None] / theta ** (torch.arange(half) / half)
        first, second = parts.chunk(2, dim=-1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )
