"""A step of the fake engine, from its launch until it is waited for: what a device would have of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Share:
    """One row as it was launched: whose, how its sequence stood, whether its last input token is still to come."""

    owner: Sequence
    sequence: Sequence
    num_tokens: int
    samples: bool
    is_ahead: bool = False

    @classmethod
    def of(cls, row: StepRow) -> Share:
        """A row that is computed at once."""
        return cls(row.sequence, row.sequence, row.num_tokens, row.samples)

    @classmethod
    def for_later(cls, row: StepRow) -> Share:
        """A row that is computed when the sequence may have gone on, ended, and lost its blocks: as a device has it."""
        sequence = copy.copy(row.sequence)
        sequence.token_ids, sequence.block_table = list(sequence.token_ids), list(sequence.block_table)
        sequence.num_computed_tokens += row.num_ahead
        return cls(row.sequence, sequence, row.num_tokens, row.samples, row.num_ahead > 0)


Compute = Callable[[Seq[Share]], list[SampledToken | None]]
"""Computes all shares of a step, at once."""


class FakeStep:
    """Implements :class:`kvrelay.engine.step.interface.LaunchedStep`: computes when it is waited for."""

    def __init__(self, compute: Compute, shares: list[Share], behind: FakeStep | None) -> None:
        self._compute = compute
        self._shares = shares
        self._behind = behind
        self._tokens: dict[Sequence, SampledToken | None] = {}
        self.is_deferred = behind is not None and any(share.sequence.needs_host_to_sample for share in shares)

    def sample(self) -> None:
        """See LaunchedStep."""
        assert self.is_deferred, "a step samples once"
        self.is_deferred = False
        for share in self._shares:
            if share.owner.status is SequenceStatus.FINISHED:
                share.sequence.guide = None
                continue
            num_tokens = share.sequence.num_tokens + share.is_ahead
            assert share.owner.num_tokens == num_tokens, f"{share.owner.key} does not have its {num_tokens} tokens yet"

    def wait(self) -> list[SampledToken | None]:
        """See LaunchedStep."""
        assert not self.is_deferred, "a step that was not told to sample yields no tokens"
        for share in self._shares:
            if share.is_ahead:
                token = None if self._behind is None else self._behind._tokens.get(share.owner)
                assert token is not None, f"{share.owner.key}: a row ahead, and no step before it sampled its token"
                share.sequence.token_ids.append(token.token_id)
        tokens = self._compute(self._shares)
        self._tokens = {share.owner: token for share, token in zip(self._shares, tokens, strict=True)}
        self._behind = None
        return tokens
