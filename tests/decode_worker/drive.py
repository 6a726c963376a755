"""A decode scheduler and an engine, driven step by step as the model thread does it, with the books checked at every step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.common.block_hash import chain_hashes, root_hash
from kvrelay.common.sampling import BeamSearch, SampledToken, SamplingParams
from kvrelay.decode_worker.beams import FinishedBeam, Search, advance
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.block_manager import BlockManager, Owner, OwnerKind, sequence_owner
from kvrelay.engine.fake import candidates, token_digests
from kvrelay.engine.interface import Engine, StepRow
from kvrelay.engine.sequence import Sequence

Result = list[int] | list[list[int]]  # the output's tokens, or those of the beams


def beams(
    width: int, max_tokens: int = 12, stops: tuple[int, ...] = (7,), **search: float | bool | None
) -> SamplingParams:
    """A beam search that returns all its beams."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        stop_token_ids=stops,
        beam_search=BeamSearch(width=width, num_return=width, **search),  # type: ignore[arg-type]
    )


def greedy(max_tokens: int = 12) -> SamplingParams:
    """Ordinary greedy sampling."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def token_lists(found: Seq[FinishedBeam]) -> list[list[int]]:
    """The tokens of each beam."""
    return [[token.token_id for token in beam.tokens] for beam in found]


def expected_beams(prompt: Seq[int], sampling: SamplingParams, vocab_size: int) -> list[list[int]]:
    """What a fake engine's beams must come to: the search alone, without blocks, batches and schedulers."""
    search = Search()
    while not search.is_over:
        told = []
        for beam in search.live:
            digest = token_digests([*prompt, *(token.token_id for token in beam.tokens)])[-1]
            told.append(SampledToken(0, top_logprobs=candidates(sampling, digest, vocab_size)))
        search = advance(search, told, sampling, sampling.max_tokens)
    return token_lists(search.finished)


class Drive:
    """A worker's model thread without the thread. ``results`` holds what has ended, ``begun`` the searches that have begun."""

    def __init__(self, engine: Engine, num_blocks: int | None = None, **settings: int) -> None:
        card = engine.card
        self.engine = engine
        self.blocks = BlockManager(num_blocks or card.num_blocks, card.layout.block_size)
        self.scheduler = DecodeScheduler(
            DecodeSchedulerSettings(**settings), self.blocks, root_hash(card.layout.fingerprint()), card.max_model_len
        )
        self.results: dict[str, Result] = {}
        self.found: dict[str, tuple[FinishedBeam, ...]] = {}
        self.begun: list[str] = []
        self.num_preemptions = 0
        self.num_copies = 0
        self.most_running = 0

    def add(self, name: str, prompt: list[int], sampling: SamplingParams, arrival_s: float = 0.0) -> Sequence:
        """A request to compute here from its prompt on."""
        sequence = Sequence(name, 1, list(prompt), len(prompt), sampling, arrival_s)
        self.scheduler.add(sequence)
        return sequence

    def hand_over(self, name: str, prompt: list[int], sampling: SamplingParams, arrival_s: float = 0.0) -> bool:
        """A request whose prompt is computed into leased blocks, by one step of its own; False if there is no room for those."""
        lease = Owner(OwnerKind.LEASE, name)
        given = self.blocks.allocate(lease, len(prompt) // self.blocks.block_size + 1)
        if given is None:
            return False
        sequence = Sequence(name, 1, list(prompt), len(prompt), sampling, arrival_s, block_table=given.block_ids)
        (first,) = self.engine.step([StepRow(sequence, len(prompt))])
        assert first is not None
        sequence.num_computed_tokens = len(prompt)
        block_size = self.blocks.block_size
        full = prompt[: len(prompt) // block_size * block_size]
        sequence.block_hashes = chain_hashes(root_hash(self.engine.card.layout.fingerprint()), full, block_size)
        for index, block_hash in enumerate(sequence.block_hashes):
            self.blocks.publish(lease, index, block_hash)
        self.blocks.hand_on(lease, sequence_owner(sequence.key))
        if sampling.beam_search is None:
            sequence.append(first, self.engine.card.max_model_len)
            self.results[name] = [first.token_id]
            self.scheduler.add(sequence)
        else:
            self.scheduler.add(sequence, first)
        return True

    def step(self) -> list[tuple[str, int]]:
        """(name, tokens) of the rows."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.num_preemptions += len(plan.preempted)
        self.num_copies += len(plan.copies)
        self.most_running = max(self.most_running, len(self.scheduler.running))
        if plan.copies:
            self.engine.copy_blocks([(copy.source, copy.target) for copy in plan.copies])
        outputs = self.engine.step(plan.rows) if plan.rows else []
        for progress in self.scheduler.postprocess(plan.rows, outputs):
            name = progress.sequence.request_id
            if progress.token is not None:
                self.results.setdefault(name, []).append(progress.token.token_id)  # type: ignore[arg-type]
            elif progress.beams:
                assert progress.sequence.finish_reason is progress.beams[0].finish_reason
                self.found[name] = progress.beams
                self.results[name] = token_lists(progress.beams)
            else:
                self.begun.append(name)
        self.scheduler.check_integrity()
        return [(row.sequence.request_id, row.num_tokens) for row in plan.rows]

    def run(self, max_steps: int = 3000) -> dict[str, Result]:
        """Until nothing is left; then every block must be free or cached."""
        for _ in range(max_steps):
            if not (self.scheduler.running or self.scheduler.waiting):
                break
            self.step()
        assert not self.scheduler.running + self.scheduler.waiting, f"still there after {max_steps} steps"
        ledger = self.blocks.ledger()
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks, ledger
        return self.results
