"""Which prompt tokens to compute next: chunked prefill under a token budget, first come first served.

``step()`` of the prefill worker is schedule → run → postprocess. A prompt gets all its blocks when it is admitted, starts
behind its cached prefix, and is computed in chunks; several prompts share a step. A computed prompt leaves the scheduler
with its blocks still held: its hand-off reads them, and whoever runs the hand-off releases them.

Runs on the model thread alone. Knows no sockets and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.engine.block_manager import BlockManager, sequence_owner
from kvrelay.engine.interface import StepRow
from kvrelay.engine.sequence import Sequence, SequenceStatus
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step did for one prompt."""

    sequence: Sequence
    num_ready_blocks: int  # leading blocks whose K/V are complete; all of them once ``token`` is there
    token: SampledToken | None  # the first token, with the prompt's last chunk
    finish_reason: FinishReason | None  # set if the first token is also the last


class PrefillScheduler:
    """Waiting and running prompts of one worker."""

    def __init__(self, settings: PrefillSchedulerSettings, blocks: BlockManager, max_model_len: int) -> None:
        self._settings = settings
        self._blocks = blocks
        self._max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a prompt. Its ``block_hashes`` must cover all its tokens, the last one maybe partial."""
        self.waiting.append(sequence)

    def remove(self, key: tuple[str, int]) -> Sequence | None:
        """Take a prompt out, wherever it is; its blocks stay held. None if it is not (or no longer) here."""
        for place in (self.waiting, self.running):
            for sequence in place:
                if sequence.key == key:
                    place.remove(sequence)
                    sequence.set_status(SequenceStatus.FINISHED)
                    return sequence
        return None

    def check_integrity(self) -> None:
        """Assert that places, statuses and the block manager's books agree: after every test, and after a failure."""
        self._blocks.check_integrity()
        for sequence in self.waiting:
            assert sequence.status is SequenceStatus.WAITING, f"{sequence.key} waits, but is {sequence.status.name}"
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING, f"{sequence.key} runs, but is {sequence.status.name}"
            owned = self._blocks.owned_blocks(sequence_owner(sequence.key))
            assert sequence.block_table == owned, f"{sequence.key} computes in {sequence.block_table}, owns {owned}"
        keys = [sequence.key for sequence in [*self.waiting, *self.running]]
        assert len(set(keys)) == len(keys), f"a prompt is here twice: {sorted(keys)}"

    def schedule(self) -> tuple[list[StepRow], list[Sequence]]:
        """Rows of the next step, and the prompts that start with it. No rows: nothing waits, or no room yet."""
        budget = self._settings.max_batched_tokens
        rows: list[StepRow] = []
        started: list[Sequence] = []
        for sequence in self.running:
            if budget == 0:
                break
            rows.append(StepRow(sequence, min(budget, sequence.num_uncomputed_tokens)))
            budget -= rows[-1].num_tokens
        while self.waiting and budget > 0 and len(self.running) < self._settings.max_num_seqs:
            if not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            sequence.set_status(SequenceStatus.RUNNING)
            self.running.append(sequence)
            started.append(sequence)
            rows.append(StepRow(sequence, min(budget, sequence.num_uncomputed_tokens)))
            budget -= rows[-1].num_tokens
        return rows, started

    def postprocess(self, rows: Seq[StepRow], outputs: Seq[SampledToken | None]) -> list[Computed]:
        """Advance the sequences by what was computed; computed prompts leave."""
        results: list[Computed] = []
        for row, token in zip(rows, outputs, strict=True):
            sequence = row.sequence
            num_full_before = sequence.num_computed_tokens // self._blocks.block_size
            sequence.num_computed_tokens += row.num_tokens
            num_ready_blocks = sequence.num_computed_tokens // self._blocks.block_size
            for index in range(num_full_before, num_ready_blocks):
                self._blocks.publish(sequence_owner(sequence.key), index, sequence.block_hashes[index])
            if token is not None:
                num_ready_blocks = len(sequence.block_table)
                self.running.remove(sequence)
                # A beam search's first tokens are chosen by the decode worker, from the candidates that come with this one.
                if sequence.sampling.beam_search is None:
                    sequence.append(token, self._max_model_len)
                sequence.set_status(SequenceStatus.FINISHED)
            results.append(Computed(sequence, num_ready_blocks, token, sequence.finish_reason))
        return results

    def _admit(self, sequence: Sequence) -> bool:
        block_size = self._blocks.block_size
        num_reusable = sequence.num_cacheable_tokens // block_size
        allocation = self._blocks.allocate(
            sequence_owner(sequence.key), len(sequence.block_hashes), sequence.block_hashes[:num_reusable]
        )
        if allocation is None:
            return False
        sequence.block_table = allocation.block_ids
        sequence.num_computed_tokens = sequence.num_cached_tokens = allocation.num_cached * block_size
        return True
