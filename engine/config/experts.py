"""What of a model's experts its forward pass must know."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Scoring(enum.Enum):
    """What becomes of a router's logits."""

    SOFTMAX = enum.auto()
    SIGMOID = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a model routes (:func:`kvrelay.engine.models.routing.route`)."""

    num_experts: int
    top_k: int  # experts of a token
    scoring: Scoring = Scoring.SOFTMAX
    is_normalised: bool = True  # a token's factors add up to 1 (before they are scaled)
    num_groups: int = 1  # of neighbouring experts
    top_groups: int = 1  # to which a token's experts belong
    scale: float = 1.0  # of all factors
    is_wide: bool = False  # logits are computed in float32, whatever the model's number format


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """``(up + 1) * gate * sigmoid(alpha * gate)`` of gates up to ``limit``, and ups no farther from 0."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A model's layers of experts."""

    router: Router
    intermediate_size: int  # of an expert
    layers: frozenset[int]  # that have experts; the others have an MLP
    shared_size: int = 0  # of the MLP that every token of such a layer goes to, too; 0: there is none
