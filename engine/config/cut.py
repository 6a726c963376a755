"""How a model with a forward pass of ours is cut among the ranks of a worker. Pure: sizes in, ranges out.

As in Megatron-LM (Shoeybi et al., 2019): a rank has some query heads with the K/V heads that these attend to, some columns of the
MLP and some rows of the vocabulary. So a layer's first products need nothing of other ranks, and what the second ones give is
summed over all. Norms are on every rank. K/V heads that are fewer than ranks are there several times.

With stages a rank has all that only of some layers, one behind the other, and hands hidden states on to the next stage's. The first
stage has the embedding, the last one norm and head. Ranks of a stage have neighbouring numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.model import ModelConfig, ModelShape

_COLUMNS_AT_ONCE = 64  # of the MLP, where the model's number of columns allows: products like them together


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's part of a model; without arguments it is all of it."""

    rank: int = 0  # among those of its stage
    num_ranks: int = 1  # of each stage
    has_whole_experts: bool = False  # of each layer of experts some, instead of a part of each
    stage: int = 0
    num_stages: int = 1

    @property
    def number(self) -> int:
        """The rank's, among all of the worker."""
        return self.stage * self.num_ranks + self.rank

    @property
    def is_first(self) -> bool:
        """Whether its stage is, which has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether its stage is, which has norm and head."""
        return self.stage == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """Its stage's layers. Stages have equally many; of a rest the first ones have one more each, as the last has the head."""
        each, rest = divmod(num_layers, self.num_stages)
        first, end = (stage * each + min(stage, rest) for stage in (self.stage, self.stage + 1))
        return range(first, end)

    def heads(self, num_heads: int) -> range:
        """The rank's heads of ``num_heads``, which fit (:func:`require_fit`); at least one."""
        first, end = (rank * num_heads // self.num_ranks for rank in (self.rank, self.rank + 1))
        return range(first, max(first + 1, end))

    def columns(self, num_columns: int) -> range:
        """The rank's columns of an MLP: ranks have equally many, but for a rest."""
        unit = _COLUMNS_AT_ONCE
        while unit > 1 and (num_columns % unit or num_columns // unit < self.num_ranks):
            unit //= 2
        first, end = (rank * (num_columns // unit) // self.num_ranks * unit for rank in (self.rank, self.rank + 1))
        return range(first, end)

    def experts(self, num_experts: int) -> range:
        """The rank's experts of a layer, of which it has ``expert_columns``."""
        if not self.has_whole_experts:
            return range(num_experts)
        first, end = (rank * num_experts // self.num_ranks for rank in (self.rank, self.rank + 1))
        return range(first, end)

    def expert_columns(self, num_columns: int) -> range:
        """The rank's columns of each of its experts."""
        return range(num_columns) if self.has_whole_experts else self.columns(num_columns)

    def vocab(self, vocab_size: int) -> range:
        """The rank's tokens. Every rank but the last ones has ``vocab_part``, so that parts can be gathered as equals."""
        part = self.vocab_part(vocab_size)
        return range(min(vocab_size, self.rank * part), min(vocab_size, (self.rank + 1) * part))

    def vocab_part(self, vocab_size: int) -> int:
        """Of how many tokens every rank computes logits; those behind the vocabulary's end mean nothing."""
        return -(-vocab_size // self.num_ranks)

    def config(self, config: ModelConfig) -> ModelConfig:
        """The model as the rank computes it; the vocabulary, and the number of experts, stay whole."""
        experts = config.experts
        return replace(
            config,
            experts=experts
            and replace(
                experts,
                intermediate_size=len(self.expert_columns(experts.intermediate_size)),
                shared_size=len(self.columns(experts.shared_size)),
            ),
            num_q_heads=len(self.heads(config.num_q_heads)),
            num_kv_heads=len(self.heads(config.num_kv_heads)),
            intermediate_size=len(self.columns(config.intermediate_size)),
            stage_layers=self.layers(config.num_layers) if self.num_stages > 1 else None,
        )


def cuts_of(num_ranks: int, num_stages: int) -> list[Cut]:
    """Of all ranks of a worker, in their order: ``num_stages`` times ``num_ranks``."""
    return [
        Cut(rank, num_ranks, stage=stage, num_stages=num_stages)
        for stage in range(num_stages)
        for rank in range(num_ranks)
    ]


def require_fit(shape: ModelShape, num_ranks: int) -> None:
    """Raise ModelError, with the numbers of ranks that fit, unless every rank gets as many heads as any other."""
    if _fits(shape, num_ranks):
        return
    fitting = [count for count in range(1, shape.num_q_heads + 1) if _fits(shape, count)]
    raise ModelError(
        f"--tensor-parallel is {num_ranks}; {shape.architecture} has {shape.num_q_heads} query and {shape.num_kv_heads} K/V heads, "
        f"which fit {', '.join(map(str, fitting))} ranks: take one of these"
    )


def require_stages(shape: ModelShape, num_stages: int) -> None:
    """Raise ModelError unless every stage gets a layer."""
    if num_stages > shape.num_layers:
        raise ModelError(
            f"--pipeline-parallel is {num_stages}; {shape.architecture} has {shape.num_layers} layers: take at most as many stages"
        )


def require_experts(config: ModelConfig, num_ranks: int) -> None:
    """Raise ModelError unless every rank gets an expert of each layer that has some."""
    if config.experts is None:
        raise ModelError(f"--expert-parallel is on, but {config.architecture} has no experts: leave it out")
    if (num_experts := config.experts.router.num_experts) < num_ranks:
        raise ModelError(
            f"--expert-parallel is on and --tensor-parallel is {num_ranks}, but {config.architecture} has {num_experts} experts: "
            f"take at most {num_experts} ranks, or leave --expert-parallel out"
        )


def _fits(shape: ModelShape, num_ranks: int) -> bool:
    are_kv_heads_alike = shape.num_kv_heads % num_ranks == 0 or num_ranks % shape.num_kv_heads == 0
    return shape.num_q_heads % num_ranks == 0 and are_kv_heads_alike
