"""The config of a model's experts, as far as the forward pass needs it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Scoring(enum.Enum):
    """How a router's logits become scores."""

    SOFTMAX = enum.auto()
    SIGMOID = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a model routes (:func:`kvrelay.engine.models.routing.route`)."""

    num_experts: int
    top_k: int  # experts per token
    scoring: Scoring = Scoring.SOFTMAX
    is_normalised: bool = True  # a token's factors add up to 1 (before ``scale``)
    num_groups: int = 1  # groups of neighbouring experts
    top_groups: int = 1  # groups that a token's experts may be in
    num_scoring: int = 1  # the best experts of a group, whose scores add up to the group's
    scale: float = 1.0  # multiplies all factors
    is_wide: bool = False  # logits are computed in float32, in a model of any dtype


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """``(up + 1) * gate * sigmoid(alpha * gate)``, with gate at most ``limit`` and up between ``-limit`` and ``limit``."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The layers of a model that have experts."""

    router: Router
    intermediate_size: int  # of one expert
    layers: frozenset[int]  # layers with experts; the others have an MLP
    shared_size: int = 0  # size of the MLP that also computes every token of such a layer; 0: there is none
