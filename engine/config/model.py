"""A decoder model's sizes and switches, read from its Hugging Face ``config.json`` without transformers.

One dataclass covers all families with our own forward pass. A table lists their differences
(:mod:`kvrelay.engine.config.families`); everything else is the same code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvrelay.common.errors import ModelError
from kvrelay.common.kv_geometry import Window
from kvrelay.engine.config.experts import ClampedSwiglu, ExpertsConfig, Router
from kvrelay.engine.config.families import FAMILIES, ExpertFacts, Family, Windows
from kvrelay.engine.config.latent import LatentConfig
from kvrelay.engine.config.rope import RopeConfig

SUPPORTED_DTYPES = ("bfloat16", "float16", "float32")
_DTYPES, _TIED = ("dtype", "torch_dtype"), "tie_word_embeddings"
_SWIGLU = {"alpha": 1.702, "limit": 7.0}
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # a config has one of these
# No model comes close. Larger numbers are mistakes, and would overflow.
_MOST = {"vocab_size": 2**28, "max_position_embeddings": 2**28}
_MOST_OF_OTHERS = 2**18


@dataclass(frozen=True, slots=True, order=True)
class KvSizes:
    """What a token keeps in a layer, in elements."""

    num_kv_heads: int
    key_size: int  # per head
    value_size: int  # 0: the layer keeps latents

    @property
    def count(self) -> int:
        """Elements of all heads, keys and values."""
        return self.num_kv_heads * (self.key_size + self.value_size)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a recurrent layer's state: what a sequence keeps of all its tokens so far."""

    kind: str  # transformers' word for it: "conv" (the last inputs of a convolution) or "recurrent"
    index: int  # among the layer's tensors of this kind
    shape: tuple[int, ...]  # of one sequence
    dtype: str
    nbytes: int
    # Along the first axis: sizes of sections that follow each other. A rank has an equal share of each.
    # Empty: all ranks have the whole tensor.
    sections: tuple[int, ...] = ()

    def of_rank(self, num_ranks: int) -> StateTensor:
        """What each of ``num_ranks`` has of it, which nobody divides further."""
        if not self.sections:
            return self
        shape = (self.shape[0] // num_ranks, *self.shape[1:])
        return replace(self, shape=shape, nbytes=self.nbytes // num_ranks, sections=())


@dataclass(frozen=True, slots=True)
class EntrySizes:
    """What a layer keeps for good of its tokens: one entry for each ``rate`` of them, once the last one is computed."""

    rate: int  # tokens
    size: int  # elements of an entry


@dataclass(frozen=True, slots=True)
class WholeLayers:
    """What the layers of a whole model keep, for a rank that has a part of it."""

    kv_sizes: tuple[KvSizes, ...]  # per layer
    states: tuple[tuple[StateTensor, ...], ...] = ()  # per recurrent layer

    def first(self, count: int, num_recurrent: int) -> WholeLayers:
        """Those of the first layers of each kind."""
        return WholeLayers(self.kv_sizes[:count], self.states[:num_recurrent])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the pool, attention and the sampler need to know of a model. Positions are in tokens."""

    architecture: str
    vocab_size: int
    num_layers: int  # layers that keep K/V
    num_q_heads: int
    num_kv_heads: int  # the most of any layer
    head_dim: int  # the largest of any layer
    max_position_embeddings: int
    sliding_windows: tuple[Window | None, ...]  # per layer; None attends to everything before it
    has_softcaps: bool = False  # some layer has a softcap on attention's scores
    has_sinks: bool = False
    latent_rank: int | None = (
        # With latents: a token keeps ``head_dim`` numbers for all heads, and this many of the first are its value, too.
        # Behind the latent there may be an indexer's key, which attention does not read.
        None
    )
    layer_sizes: tuple[KvSizes, ...] | None = None  # per layer; None: all keep ``num_kv_heads`` heads of ``head_dim``
    # Of a rank: what the whole model's layers keep, so that all ranks have its groups of layers; None: what these layers keep.
    whole_layers: WholeLayers | None = None
    states: tuple[tuple[StateTensor, ...], ...] = ()  # per recurrent layer; in the pool they follow the other layers
    # Per layer that compresses (:mod:`kvrelay.engine.kv.entries`). In the pool the entries of all of them are one layer more, which
    # follows the others.
    entries: tuple[EntrySizes, ...] = ()
    # Tokens of an image see each other (``Batch.last_seen``) only in layers with a window, as in Gemma 4; else in all of them.
    sees_ahead_in_windows_only: bool = False
    stage_layers: range | None = None  # with stages: the layers of this stage; None: all
    dtype: str
    rope_text: str  # equal if and only if the rotations are equal

    @property
    def kv_sizes(self) -> tuple[KvSizes, ...]:
        """The sizes of each layer."""
        if self.layer_sizes is not None:
            return self.layer_sizes
        value_size = self.head_dim if self.latent_rank is None else 0
        return (KvSizes(self.num_kv_heads, self.head_dim, value_size),) * len(self.sliding_windows)

    def sees_ahead(self, window: Window | None) -> bool:
        """Whether attention in layers with this window follows :attr:`Batch.last_seen`; else tokens see none behind their own."""
        return window is not None or not self.sees_ahead_in_windows_only

    @property
    def kv_size(self) -> int:
        """Elements of all key heads of a token; values have as many."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelShape):
    """Sizes and switches of a model with our own forward pass. Lengths are in elements."""

    hidden_size: int
    intermediate_size: int  # of the MLP in a layer without experts
    rms_norm_eps: float
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    rope: RopeConfig
    experts: ExpertsConfig | None = None
    clamped_swiglu: ClampedSwiglu | None = None  # None: ``silu(gate) * up``
    latent: LatentConfig | None = None  # None: ordinary attention by heads
    num_draft_layers: int = 0  # extra layers of a checkpoint for drafting tokens (MTP)
    has_draft_layer: bool = False  # the first of these is loaded

    @property
    def rotary_size(self) -> int:
        """Elements of a head that rotate, which are its first ones."""
        return self.rope.rotary_size(self.head_dim)

    @property
    def q_size(self) -> int:
        """Elements of all query heads of a token."""
        return self.num_q_heads * self.head_dim

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        """The sizes of all MLPs and experts."""
        if self.experts is None:
            return (self.intermediate_size,)
        has_dense = len(self.experts.layers) < self.num_layers
        shared = (self.experts.shared_size,) if self.experts.shared_size else ()
        return (self.experts.intermediate_size, *shared, *((self.intermediate_size,) if has_dense else ()))


def architecture_of(directory: Path) -> str:
    """The transformers class that a checkpoint names. Raises ModelError on a missing or broken ``config.json``."""
    return _architecture(read_config(directory))


def needs_transformers(backend: str, directory: Path) -> bool:
    """Whether the model in ``directory`` runs through transformers: ``backend`` asks for it, or we have no forward pass for the
    model, or one that leaves out what transformers reads of it.
    """
    if backend != "auto":
        return backend == "transformers"
    family = FAMILIES.get(architecture_of(directory))
    return family is None or (family.text is not None and family.text.gives_way)


def load_config(directory: Path) -> ModelConfig:
    """Read ``config.json``. Raises ModelError if it is missing or broken, or the model is not supported."""
    return parse_config(read_config(directory), str(directory))


def _architecture(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or ["none"])[0])


def read_config(directory: Path) -> Mapping[str, Any]:
    """A checkpoint's ``config.json``. Raises ModelError if it is missing or broken."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{directory} has no config.json: it is not a Hugging Face model directory") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object")
    return config


def parse_config(config: Mapping[str, Any], directory: str) -> ModelConfig:
    """Parse a config dictionary; ``directory`` appears in errors."""
    architecture = _architecture(config)
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(
            f"{directory}: architecture {architecture} is not supported; supported are {', '.join(FAMILIES)}"
        )
    config = {**family.defaults, **_of_text(config, family, directory)}

    def size(name: str, default: int | None = None) -> int:
        value = config.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelError(f"{directory}: config.json has no {name!r}")
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{directory}: {name!r} is {value!r}; it must be a positive integer")
        if value > (most := _MOST.get(name, _MOST_OF_OTHERS)):
            raise ModelError(f"{directory}: {name!r} is {value} in config.json; at most {most} is possible")
        return value

    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{directory}: hidden_act {config['hidden_act']!r} is not supported; only silu is")
    num_q_heads, num_layers = size("num_attention_heads"), size("num_hidden_layers")
    num_kv_heads = size("num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise ModelError(
            f"{directory}: {num_q_heads} attention heads are no multiple of {num_kv_heads} key/value heads"
        )
    head_dim = size("head_dim", size("hidden_size") // num_q_heads)
    if head_dim % 2:
        raise ModelError(f"{directory}: head_dim is {head_dim}; it must be even")
    attention_bias = bool(config.get("attention_bias", False))
    rotated = size("qk_rope_head_dim") if family.is_latent else 0
    share = rotated / (rotated + size("qk_nope_head_dim")) if family.is_latent else 1.0
    rope = RopeConfig.parse(config, directory, share, may_be_partial=family.has_partial_rotary)
    if (rotary_size := rope.rotary_size(head_dim)) < 2 or rotary_size % 2:
        raise ModelError(
            f"{directory}: {rotary_size} of {head_dim} dimensions rotate by partial_rotary_factor {rope.fraction}; "
            "this must be an even number above 0"
        )
    has_qkv_bias = attention_bias if family.has_qkv_bias is None else family.has_qkv_bias
    latent: LatentConfig | None = None
    if family.is_latent:
        latent = LatentConfig.parse(
            *(config, size, rope, directory),
            is_indexer_interleaved=family.is_indexer_interleaved,
            has_query_growth=family.has_query_growth,
        )
        num_kv_heads, head_dim = 1, latent.row_size
    return ModelConfig(
        architecture=architecture,
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6, directory),
        max_position_embeddings=max(size("max_position_embeddings"), rope.stretched_len),
        has_tied_embeddings=bool(config.get(_TIED, False)),
        has_qkv_bias=has_qkv_bias,
        has_o_bias=attention_bias and family.has_qkv_bias is None and family.may_have_o_bias,
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        has_qk_norm=bool(config.get("use_qk_norm")) if family.has_qk_norm is None else family.has_qk_norm,
        has_sinks=family.has_sinks,
        latent=latent,
        num_draft_layers=size("num_nextn_predict_layers", 0) if config.get("num_nextn_predict_layers") else 0,
        latent_rank=None if latent is None else latent.rank,
        clamped_swiglu=_clamped_swiglu(config, directory) if family.has_clamped_swiglu else None,
        experts=None if family.experts is None else _experts(config, family.experts, num_layers, size, directory),
        sliding_windows=_sliding_windows(config, family, num_layers, directory),
        rope=rope,
        rope_text=rope.canonical,
        dtype=_dtype(config, directory),
    )


def _of_text(config: Mapping[str, Any], family: Family, directory: str) -> Mapping[str, Any]:
    """What a config says of the decoder of text. Whether embeddings are tied is a fact of the whole checkpoint."""
    if family.text is None:
        return config
    part = config.get(family.text.config)
    if not isinstance(part, Mapping):
        raise ModelError(f"{directory}: config.json has no {family.text.config!r}, which describes its decoder of text")
    if family.text.types and part.get("model_type") not in family.text.types:
        raise ModelError(
            f"{directory}: its decoder of text is of type {part.get('model_type')!r}; our forward pass for "
            f"{_architecture(config)} has {', '.join(family.text.types)}: take --backend auto"
        )
    dtypes = {name: config[name] for name in _DTYPES if name in config and part.get(name) is None}
    tied = {_TIED: config[_TIED]} if _TIED in config else {}
    return {**part, **dtypes, **tied}


def _number(config: Mapping[str, Any], name: str, default: float, directory: str) -> float:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int | float):
        raise ModelError(f"{directory}: {name!r} is {value!r}; it must be a number")
    return float(value)


def _dtype(config: Mapping[str, Any], directory: str) -> str:
    dtype = str(next(filter(None, map(config.get, _DTYPES)), "float32")).removeprefix("torch.")
    if dtype not in SUPPORTED_DTYPES:
        raise ModelError(f"{directory}: dtype {dtype} is not supported; supported are {', '.join(SUPPORTED_DTYPES)}")
    return dtype


def _clamped_swiglu(config: Mapping[str, Any], directory: str) -> ClampedSwiglu:
    alpha, limit = (_number(config, f"swiglu_{name}", given, directory) for name, given in _SWIGLU.items())
    return ClampedSwiglu(alpha, limit)


def _sliding_windows(
    config: Mapping[str, Any], family: Family, num_layers: int, directory: str
) -> tuple[Window | None, ...]:
    window = config.get("sliding_window")
    is_on = config.get("use_sliding_window", False) or not family.has_window_switch
    if window is None or family.windows is Windows.NONE or not is_on:
        return (None,) * num_layers
    if family.windows is Windows.ALL:
        return (int(window),) * num_layers
    layer_types = config.get("layer_types")
    if layer_types is None and not family.has_window_switch:
        raise ModelError(f"{directory}: config.json has no 'layer_types', which tell where 'sliding_window' is meant")
    if layer_types is None:
        first = int(config.get("max_window_layers", 28))
        layer_types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)


def _experts(
    config: Mapping[str, Any], facts: ExpertFacts, num_layers: int, size: Callable[..., int], directory: str
) -> ExpertsConfig:
    num_experts = size(next((name for name in _NUM_EXPERTS if config.get(name) is not None), _NUM_EXPERTS[0]))
    top_k = size("num_experts_per_tok")
    if top_k > num_experts:
        raise ModelError(f"{directory}: 'num_experts_per_tok' is {top_k}; the model has {num_experts} experts")
    layers = set(range(num_layers))
    if facts.has_dense_layers:
        step = size("decoder_sparse_step", 1)
        layers = set(range(step - 1, num_layers, step)).difference(config.get("mlp_only_layers") or ())
    if facts.has_first_dense and (kinds := config.get("mlp_layer_types")) is not None:
        layers = {layer for layer, kind in enumerate(kinds[:num_layers]) if kind == "sparse"}
    elif facts.has_first_dense:
        step = size("moe_layer_freq", 1)
        layers = {
            layer for layer in range(int(config.get("first_k_dense_replace") or 0), num_layers) if layer % step == 0
        }
    is_normalised = bool(config.get("norm_topk_prob")) if facts.is_normalised is None else facts.is_normalised
    has_groups = facts.has_groups and config.get("topk_method") != "greedy"
    num_groups = size("n_group", 1) if has_groups else 1
    if num_experts % num_groups:
        raise ModelError(f"{directory}: 'n_group' is {num_groups}; it must divide the {num_experts} experts")
    top_groups, of_group = size("topk_group", 1) if num_groups > 1 else 1, num_experts // num_groups
    if top_groups > num_groups or top_groups * of_group < top_k or (num_groups > 1 and of_group < facts.num_scoring):
        raise ModelError(
            f"{directory}: 'topk_group' is {top_groups} of {num_groups} groups with {of_group} experts each; that is too many, or "
            f"leaves too few for the {top_k} experts of a token"
        )
    return ExpertsConfig(
        router=Router(
            num_experts=num_experts,
            top_k=top_k,
            scoring=facts.scoring,
            is_normalised=is_normalised,
            num_groups=num_groups,
            top_groups=top_groups,
            num_scoring=facts.num_scoring,
            scale=_number(config, "routed_scaling_factor", 1.0, directory),
            is_wide=facts.is_wide,
        ),
        intermediate_size=size(facts.intermediate_size),
        layers=frozenset(layers),
        shared_size=0 if facts.shared is None else size("n_shared_experts") * size(facts.intermediate_size),
    )
