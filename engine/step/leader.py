"""A worker's access to its engine: rows of sequences in, their tokens out. Between the two there are only plans.

All processes that compute a worker's steps have one leader. It alone has the sequences, their guides and their clients.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import islice

from kvrelay.engine.step.interface import Engine, LaunchedStep, StepRow
from kvrelay.engine.step.plan import RowResult
from kvrelay.engine.step.planner import Planner
from kvrelay.engine.step.sequence import Sequence, SequenceStatus


class LedStep:
    """A running step of a leader's rows.

    Its sampling is launched with it, unless it is *deferred*. A step is deferred if it follows another one and has a row that can
    be sampled only once the host knows the token before (``Sequence.needs_host_to_sample``). Its logits are computed meanwhile. The
    order of calls is then: launch it, wait for the step in front, let all sequences take that step's tokens, ``sample``, launch the
    next one, ``wait``.
    """

    def __init__(
        self,
        planner: Planner,
        order: Seq[tuple[int, tuple[int, ...]]],
        samples: dict[Sequence, int],
        launched: LaunchedStep | None,
    ) -> None:
        """``order``: for each planned row, the index of the caller's row, and its draft. ``launched``: None without rows.

        ``samples``: the sequences that the step samples for, in order, with their number of tokens. Without sequences with a draft,
        whose next token may be at several positions.
        """
        self._planner = planner
        self._order = order
        self._launched = launched
        self.samples = samples

    @property
    def is_deferred(self) -> bool:
        """Whether ``sample`` must still be called."""
        return self._launched is not None and self._launched.is_deferred

    def sample(self) -> None:
        """Launch the sampling of a deferred step, once. It may wait for the device if its rows require that.

        All sequences must have their tokens by now, except finished ones. Those yield a token that does not count, and their guides
        are not asked.
        """
        assert self._launched is not None, "a step of no rows samples nothing"
        assert self._launched.is_deferred, "a step samples once"
        for sequence, count in self.samples.items():
            is_there = sequence.status is SequenceStatus.FINISHED or sequence.num_tokens == count
            assert is_there, f"{sequence.key}: {sequence.num_tokens} tokens, not {count}"
        try:
            self._launched.sample(self._planner.sampling_inputs(self.samples))
        except BaseException:
            self._planner.reset()
            raise

    def wait(self) -> list[RowResult]:
        """The results of ``Leader.step``; waits for them. Everything that the step wrote is then visible. Call it once.

        For a deferred step it raises AssertionError, after the step has written its last block.
        """
        results = [RowResult()] * len(self._order)
        if self._launched is not None:
            planned = iter(self._launched.wait())
            for place, draft in self._order:
                results[place] = next(planned)
                if draft:
                    results[place] = _accept(results[place], draft, list(islice(planned, len(draft))))
        return results


class Leader:
    """The only sender of plans to its engine. Use it on the model thread only."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._planner = Planner(engine.num_slots, engine.card.vocab_size)

    def slot_of(self, sequence: Sequence) -> int | None:
        """The engine's slot that has held the sequence since its last step; None if it has none."""
        return self._planner.slot_of(sequence)

    def step(self, rows: Seq[StepRow]) -> list[RowResult]:
        """Compute one ragged batch: write the K/V of every row's tokens into its blocks, and sample where a row ends its sequence.

        Does not change sequences; the scheduler advances them afterwards. There is one result per row. Rows may mix prefill chunks
        and decode tokens in any order. Raises ValueError on a row without tokens, or with more tokens than its sequence or its
        block table has (a bug of the scheduler).
        """
        return self.launch(rows).wait()

    def launch(self, rows: Seq[StepRow], behind: LedStep | None = None) -> LedStep:
        """Begin a step and return before it is done. Steps run in the order of their launches; at most two are under way.

        ``behind``: the step launched before, if it was not waited for; it must not be deferred. Rows with ``num_ahead`` get their
        tokens from it. Until ``wait``, the step owns the blocks of all rows, also those of sequences that have ended meanwhile.
        Raises as ``step``.
        """
        order = sorted(range(len(rows)), key=lambda index: rows[index].num_tokens > 1)
        ordered = [rows[index] for index in order]
        if not ordered:
            return LedStep(self._planner, (), {}, None)
        # A deferred step has no tokens to continue from, and this step may overwrite its logits.
        assert behind is None or not behind.is_deferred, "the step in front was not told to sample"
        try:
            plan = self._planner.plan(ordered, None if behind is None else behind.samples)
            samples = {
                row.sequence: row.sequence.num_computed_tokens + row.num_ahead + row.num_tokens
                for row in ordered
                if row.samples and not row.draft
            }
            drafts = [(index, rows[index].draft) for index in order]
            return LedStep(self._planner, drafts, samples, self.engine.launch(plan))
        except BaseException:
            self._planner.reset()
            raise


def _accept(result: RowResult, draft: tuple[int, ...], behind: Seq[RowResult]) -> RowResult:
    """The row's result plus those ``behind`` its draft's tokens, up to the first draft token that differs from the sampled one.

    A sample depends only on seed, choice, position and the tokens before it. So these are the tokens of steps without a draft.
    """
    tokens = list(result.tokens)
    for token_id, following in zip(draft, behind, strict=True):
        if tokens[-1].token_id != token_id:
            break
        tokens += following.tokens
    return RowResult(tuple(tokens), result.prompt_logprobs)
