"""How a model with our own forward pass is cut among a worker's ranks. Pure: sizes in, ranges out.

As in Megatron-LM (Shoeybi et al., 2019), a rank has some query heads with their K/V heads, some columns of the MLP and some rows of
the vocabulary. So a layer's first products need nothing from other ranks, and the results of the second ones are summed over all
ranks. Norms are on every rank. If there are fewer K/V heads than ranks, several ranks have the same head.

With stages, a rank has all that of some consecutive layers only, and passes hidden states to the next stage. The first stage has
the embedding, the last one norm and head. The ranks of a stage have consecutive numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.model import ModelConfig, ModelShape

_COLUMNS_AT_ONCE = 64  # the MLP is cut at multiples of this where possible: products are then fast


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's part of a model; the default is the whole model."""

    rank: int = 0  # within its stage
    num_ranks: int = 1  # ranks of each stage
    has_whole_experts: bool = False  # the rank has some whole experts of each layer, instead of a part of each expert
    stage: int = 0
    num_stages: int = 1

    @property
    def number(self) -> int:
        """The rank's number among all ranks of the worker."""
        return self.stage * self.num_ranks + self.rank

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage, which has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which has norm and head."""
        return self.stage == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """The stage's layers. All stages have equally many.

        A remainder goes to the first ones, because the last stage has the head.
        """
        each, rest = divmod(num_layers, self.num_stages)
        first, end = (stage * each + min(stage, rest) for stage in (self.stage, self.stage + 1))
        return range(first, end)

    def heads(self, num_heads: int) -> range:
        """The rank's heads of ``num_heads``, which must fit (:func:`require_fit`); at least one."""
        first, end = (rank * num_heads // self.num_ranks for rank in (self.rank, self.rank + 1))
        return range(first, max(first + 1, end))

    def columns(self, num_columns: int) -> range:
        """The rank's columns of an MLP. Ranks have equally many, except for a remainder."""
        unit = _COLUMNS_AT_ONCE
        while unit > 1 and (num_columns % unit or num_columns // unit < self.num_ranks):
            unit //= 2
        first, end = (rank * (num_columns // unit) // self.num_ranks * unit for rank in (self.rank, self.rank + 1))
        return range(first, end)

    def experts(self, num_experts: int) -> range:
        """The rank's experts of a layer. Of each it has the ``expert_columns``."""
        if not self.has_whole_experts:
            return range(num_experts)
        first, end = (rank * num_experts // self.num_ranks for rank in (self.rank, self.rank + 1))
        return range(first, end)

    def expert_columns(self, num_columns: int) -> range:
        """The rank's columns of each of its experts."""
        return range(num_columns) if self.has_whole_experts else self.columns(num_columns)

    def vocab(self, vocab_size: int) -> range:
        """The rank's tokens. All ranks except the last ones have ``vocab_part`` tokens."""
        part = self.vocab_part(vocab_size)
        return range(min(vocab_size, self.rank * part), min(vocab_size, (self.rank + 1) * part))

    def vocab_part(self, vocab_size: int) -> int:
        """The number of tokens whose logits each rank computes, so that equal parts can be gathered.

        Those past the vocabulary are meaningless.
        """
        return -(-vocab_size // self.num_ranks)

    def config(self, config: ModelConfig) -> ModelConfig:
        """The model's config with the rank's sizes. The vocabulary and the number of experts stay whole."""
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
    """The cuts of a worker's ranks, in order: ``num_stages`` times ``num_ranks``."""
    return [
        Cut(rank, num_ranks, stage=stage, num_stages=num_stages)
        for stage in range(num_stages)
        for rank in range(num_ranks)
    ]


def require_fit(shape: ModelShape, num_ranks: int) -> None:
    """Raise ModelError, listing the numbers of ranks that fit, unless all ranks get equally many heads."""
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


def require_indexers(config: ModelConfig, num_stages: int) -> None:
    """Raise ModelError if a stage would begin with a layer whose tokens an earlier stage picks."""
    indexer = None if config.latent is None else config.latent.indexer
    if indexer is None:
        return
    for stage in range(num_stages):
        first = Cut(stage=stage, num_stages=num_stages).layers(config.num_layers).start
        if first not in indexer.layers:
            raise ModelError(
                f"--pipeline-parallel is {num_stages}; the stage that begins with layer {first} would need what an earlier layer's "
                "indexer picks: take a number of stages that each begin with an indexer, or --tensor-parallel"
            )


def require_experts(config: ModelConfig, num_ranks: int) -> None:
    """Raise ModelError unless every rank gets an expert of each layer with experts."""
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
