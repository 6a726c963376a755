"""The interface to beam searches: the scheduler runs sequences, and asks here which of them belong together.

A search waits as one sequence and runs as several, which advance together (:mod:`kvrelay.engine.beams.group`). It takes ``width``
places from the start, and is preempted and removed as a whole. Its sequences share blocks: a new beam reads the common part in
another beam's blocks. A beam that writes to a shared block gets a copy of it first.

The scheduler moves sequences between its places as it is told. Use this on the model thread only.
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
    """How a step changed a search's sequences."""

    joined: list[Sequence] = field(default_factory=list)  # these have their blocks and run from now on
    ended: list[Sequence] = field(default_factory=list)
    told: Sequence | None = None  # the sequence that reports the begin of the search or, with its ``beams``, its end
    beams: tuple[FinishedBeam, ...] = ()


class BeamSearches:
    """All waiting and running searches."""

    def __init__(self, blocks: BlockManager, max_model_len: int) -> None:
        self._blocks = blocks
        self._max_model_len = max_model_len
        self._groups: dict[tuple[str, int], BeamGroup] = {}

    def add(self, sequence: Sequence, first: SampledToken | None) -> None:
        """``first``: the prefill worker's sample, if the sequence was handed over.

        Does nothing for a sequence that is no search.
        """
        if sequence.sampling.beam_search is not None:
            self._groups[sequence.key] = BeamGroup(sequence, self._max_model_len, first)

    def remove(self, key: tuple[str, int]) -> list[Sequence]:
        """Forget a search and return its sequences, the leader first. Empty if ``key`` is no search here."""
        group = self._groups.pop(key, None)
        return [] if group is None else group.beams

    def restart(self, sequence: Sequence) -> list[Sequence]:
        """``sequence`` loses its blocks. Returns the sequences that lose theirs with it, after the one that waits for all; only
        itself if it is no search.
        """
        group = self._groups.get(sequence.key)
        if group is None:
            return [sequence]
        group.forget()
        return group.beams

    @property
    def num_reserved(self) -> int:
        """Batch places that running searches have no beams for yet."""
        return sum(
            group.width - sum(beam.status is SequenceStatus.RUNNING for beam in group.beams)
            for group in self._groups.values()
            if group.leader.status is SequenceStatus.RUNNING
        )

    def hear(self, beam: Sequence, token: SampledToken) -> None:
        """Take in the engine's sample for a beam."""
        self._groups[beam.key].hear(beam, token)

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether it is a search whose beams all have samples, so that its next beams can be chosen."""
        group = self._groups.get(sequence.key)
        return group is not None and group.is_ready

    def go_forward(self) -> Iterator[Change]:
        """Choose the next beams of each search whose beams all have samples.

        After a preemption, let the others follow the leader.
        """
        for key, group in list(self._groups.items()):
            if group.leader.status is not SequenceStatus.RUNNING:
                continue
            if group.is_ready:
                yield self._advance(key, group)
            elif group.has_heard(group.leader):
                leader, *others = group.beams
                idle = [beam for beam in others if beam.status is SequenceStatus.WAITING]
                for beam in idle:
                    num_same = num_common(leader.token_ids, beam.token_ids)
                    # The leader's last state is of its own tokens, but those at the ends of blocks are as they were.
                    if self._blocks.has_states:
                        num_same -= num_same % self._blocks.block_size
                    self._share(leader, beam, num_same)
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
        """``child`` continues after ``num_tokens`` tokens, whose K/V it reads in the parent's blocks."""
        num_blocks = self._blocks.num_blocks_for(num_tokens)
        child.block_tables = self._blocks.fork(_owner_of(parent), _owner_of(child), num_blocks)
        child.num_computed_tokens = num_tokens

    def unshare(self, sequence: Sequence, copies: dict[Sequence, list[tuple[int, int]]]) -> bool:
        """Copy on write: make the block where a beam's next tokens begin its own. False if there is no free block for that.

        ``copies``: whole blocks to copy as (source, target), by the sequence that writes after them; this adds to it.
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
        """Assert that ``placed`` has exactly the beams that wait or run, and that all other beams hold no blocks."""
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
