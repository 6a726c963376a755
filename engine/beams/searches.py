"""The one door to beam searches: the scheduler runs sequences, and asks here which of them belong together.

A search waits as one sequence and runs as several, which go forward in step (:mod:`kvrelay.engine.beams.group`). It takes
``width`` places from the start, and is preempted and removed as a whole. Its sequences share blocks. A new beam reads in another's
blocks what both have in common. One that writes to a shared block gets a copy of it first.

The scheduler moves sequences between its places, as it is told. Model thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.beams.group import BeamGroup, num_common
from kvrelay.engine.beams.search import FinishedBeam
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import Owner, sequence_owner
from kvrelay.engine.step.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Change:
    """How a search's sequences changed with a step."""

    joined: list[Sequence] = field(default_factory=list)  # they have their blocks, and run from now on
    ended: list[Sequence] = field(default_factory=list)
    told: Sequence | None = None  # by whom the search tells that it has begun or, with its ``beams``, ended
    beams: tuple[FinishedBeam, ...] = ()


class BeamSearches:
    """All searches that wait or run."""

    def __init__(self, blocks: BlockManager, max_model_len: int) -> None:
        self._blocks = blocks
        self._max_model_len = max_model_len
        self._groups: dict[tuple[str, int], BeamGroup] = {}

    def add(self, sequence: Sequence, first: SampledToken | None) -> None:
        """``first``: of one that was handed over, what the prefill worker sampled. A sequence that is no search does not matter."""
        if sequence.sampling.beam_search is not None:
            self._groups[sequence.key] = BeamGroup(sequence, self._max_model_len, first)

    def remove(self, key: tuple[str, int]) -> list[Sequence]:
        """Forget a search; returns its sequences, the leader first. None of them, if ``key`` is no search here."""
        group = self._groups.pop(key, None)
        return [] if group is None else group.beams

    def restart(self, sequence: Sequence) -> list[Sequence]:
        """It loses its blocks: who else does, behind the one that waits for all of them. Just itself, if it is no search."""
        group = self._groups.get(sequence.key)
        if group is None:
            return [sequence]
        group.forget()
        return group.beams

    @property
    def num_reserved(self) -> int:
        """Places in the batch that running searches have no beams for yet."""
        return sum(
            group.width - sum(beam.status is SequenceStatus.RUNNING for beam in group.beams)
            for group in self._groups.values()
            if group.leader.status is SequenceStatus.RUNNING
        )

    def hear(self, beam: Sequence, token: SampledToken) -> None:
        """What the engine sampled for a beam."""
        self._groups[beam.key].hear(beam, token)

    def go_forward(self) -> Iterator[Change]:
        """Choose the next beams of searches whose beams have all heard; after a preemption, let the others follow the leader."""
        for key, group in list(self._groups.items()):
            if group.leader.status is not SequenceStatus.RUNNING:
                continue
            if group.is_ready:
                yield self._advance(key, group)
            elif group.has_heard(group.leader):
                leader, *others = group.beams
                idle = [beam for beam in others if beam.status is SequenceStatus.WAITING]
                for beam in idle:
                    self._share(leader, beam, num_common(leader.token_ids, beam.token_ids))
                yield Change(joined=idle)

    def _advance(self, key: tuple[str, int], group: BeamGroup) -> Change:
        leader = group.leader
        turnover = group.advance()
        for parent, child in turnover.forked:
            self._share(parent, child, parent.num_computed_tokens)
        joined = [child for _, child in turnover.forked]
        if group.is_over:
            del self._groups[key]
            leader.finish_reason = group.result[0].finish_reason
            return Change(joined, turnover.ended, leader, group.result)
        return Change(joined, turnover.ended, group.leader if group.num_steps == 1 else None)

    def _share(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """The child goes on behind ``num_tokens`` tokens, whose K/V it reads in the parent's blocks."""
        num_blocks = self._blocks.num_blocks_for(num_tokens)
        child.block_tables = self._blocks.fork(_owner_of(parent), _owner_of(child), num_blocks)
        child.num_computed_tokens = num_tokens

    def unshare(self, sequence: Sequence, copies: dict[Sequence, list[tuple[int, int]]]) -> bool:
        """Copy on write: a beam's next tokens begin in a block that only it holds. False if there is none for that.

        ``copies``: of whole blocks, by who writes behind them, as (source, target); further ones are added if it takes any.
        """
        index, num_written = divmod(sequence.num_computed_tokens, self._blocks.block_size)
        if sequence.sampling.beam_search is None or num_written == 0:
            return True
        own = self._blocks.make_writable(_owner_of(sequence), index)
        if own is None:
            return False
        for table, block_id in zip(sequence.block_tables, own, strict=True):
            if table[index] != block_id:
                copies.setdefault(sequence, []).append((table[index], block_id))
                table[index] = block_id
        return True

    def check_integrity(self, placed: Seq[Sequence]) -> None:
        """Assert that exactly the beams of searches wait or run among ``placed``, and that those that do neither hold nothing."""
        led = {(one.key, one.beam) for one in placed if one.sampling.beam_search is not None}
        for key, group in self._groups.items():
            assert (key, group.leader.beam) in led, f"nobody waits or runs for the beam search {key}"
            led -= {(key, beam.beam) for beam in group.beams}
            for beam in group.beams:
                is_idle = beam.status is SequenceStatus.WAITING and beam is not group.leader
                assert not (is_idle and beam.block_tables), f"beam {beam.beam} of {key} idles in {beam.block_tables}"
        assert not led, f"beams without a search: {sorted(led)}"


def _owner_of(beam: Sequence) -> Owner:
    return sequence_owner(beam.key, beam.beam)
