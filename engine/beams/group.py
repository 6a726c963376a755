"""The sequences of one beam search on a decode worker, which advance together.

A group begins with one sequence, the prompt. When the engine has sampled for every beam, ``advance`` chooses the next beams. The
first child of a beam continues in its parent's sequence, and further children are forked from it. Beams without children end.

The scheduler owns the blocks: it shares, copies and releases them as the group says. It also preempts the group, always as a whole.
Afterwards the leader, the first beam, is computed again; the others follow from what they share with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.beams.search import FinishedBeam, Search, advance
from kvrelay.engine.step.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Turnover:
    """How a group's sequences changed in a step."""

    forked: list[tuple[Sequence, Sequence]]  # (parent, child): the child continues from the parent's computed tokens
    ended: list[Sequence]


class BeamGroup:
    """One beam search. Use it on the model thread only."""

    def __init__(self, root: Sequence, max_model_len: int, first: SampledToken | None) -> None:
        """``first``: the prefill worker's sample after the prompt, with its candidates; None if it is computed here."""
        params = root.sampling.beam_search
        assert params is not None, f"{root.key} asks for no beam search"
        self.width = params.width
        self.num_steps = 0 if first is None else -1  # steps that were computed here
        self.beams = [root]  # in the order of the search's live beams
        self._sampling = root.sampling
        self._num_return = params.num_return
        self._max_tokens = max(1, min(root.sampling.max_tokens, max_model_len - root.num_prompt_tokens))
        self._search = Search()
        self._heard = {} if first is None else {root: first}
        self._num_made = 1

    @property
    def leader(self) -> Sequence:
        """The sequence that represents the group: it stands in the waiting line, and is computed first after a preemption."""
        return self.beams[0]

    @property
    def is_ready(self) -> bool:
        """Whether the engine has sampled for all beams."""
        return len(self._heard) == len(self.beams)

    @property
    def is_over(self) -> bool:
        """Whether the search has ended."""
        return self._search.is_over

    @property
    def result(self) -> tuple[FinishedBeam, ...]:
        """The beams to return, best first. If the search is not over: the best so far."""
        return self._search.finished[: self._num_return]

    def hear(self, beam: Sequence, token: SampledToken) -> None:
        """Take in the engine's sample for a beam."""
        self._heard[beam] = token

    def has_heard(self, beam: Sequence) -> bool:
        """Whether the beam has its sample, and waits for the others."""
        return beam in self._heard

    def forget(self) -> None:
        """The group lost its blocks: this step's samples will be computed again."""
        self._heard.clear()

    def advance(self) -> Turnover:
        """Choose the next beams and append their tokens. If that ends the search, all beams end."""
        parents, sampled = self.beams, [self._heard[beam] for beam in self.beams]
        self._heard.clear()
        self.num_steps += 1
        self._search = advance(self._search, sampled, self._sampling, self._max_tokens)
        if self.is_over:
            return Turnover([], parents)
        self.beams, forked = [], []
        for live in self._search.live:
            parent = parents[live.parent]
            child = parent
            if parent in self.beams:
                child = self._fork(parent)
                forked.append((parent, child))
            self.beams.append(child)
        for beam, live in zip(self.beams, self._search.live, strict=True):
            beam.token_ids.append(live.tokens[-1].token_id)
        return Turnover(forked, [parent for parent in parents if parent not in self.beams])

    def _fork(self, parent: Sequence) -> Sequence:
        beam, self._num_made = self._num_made, self._num_made + 1
        return dataclasses.replace(
            parent,
            beam=beam,
            status=SequenceStatus.WAITING,
            token_ids=list(parent.token_ids),
            block_tables=[],
            chain=None if parent.chain is None else parent.chain.copy(),
            sampling=parent.sampling.after_prefill(),
            prompt_logprobs=[],
        )


def num_common(ours: Seq[int], theirs: Seq[int]) -> int:
    """The number of leading tokens that are equal."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return index
    return min(len(ours), len(theirs))
