"""A worker's way to its engine: rows of sequences in, their tokens out. In between there are only plans.

Of all that computes a worker's steps there is one leader: it has the sequences, their guides and their clients.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import islice

from kvrelay.engine.step.interface import Engine, LaunchedStep, StepRow
from kvrelay.engine.step.plan import RowResult
from kvrelay.engine.step.planner import Planner
from kvrelay.engine.step.sequence import Sequence, SequenceStatus


class LedStep:
    """A step under way, of a leader's rows.

    Its sampling is launched with it, unless it is *deferred*: that is a step behind another one with a row that can only be sampled
    once the host knows the token in front (``Sequence.needs_host_to_sample``). Of such a step the logits are computed meanwhile.
    The order of calls is then: launch it, wait for the step in front, let all sequences take the tokens of that in, ``sample``,
    launch the next one, ``wait``.
    """

    def __init__(
        self,
        planner: Planner,
        order: Seq[tuple[int, tuple[int, ...]]],
        samples: dict[Sequence, int],
        launched: LaunchedStep | None,
    ) -> None:
        """``order``: as rows were planned, which of the caller's each is, and its draft. ``launched``: None without rows.

        ``samples``: whose tokens the step samples, in order, and behind how many tokens of each; without those that have a draft,
        whose next token may be any of several.
        """
        self._planner = planner
        self._order = order
        self._launched = launched
        self.samples = samples

    @property
    def is_deferred(self) -> bool:
        """Whether the step still has to be told to ``sample``."""
        return self._launched is not None and self._launched.is_deferred

    def sample(self) -> None:
        """Launch the sampling of a deferred step, once; it may wait for the device if its rows ask for that.

        Every row but those of finished sequences must have all its tokens by now. Finished ones yield a token that means nothing,
        and nobody asks their guides.
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
        """What ``Leader.step`` returns, once it is there: everything that the step wrote is then visible. Call it once.

        Of a deferred step it raises AssertionError, when the step writes to no block any more.
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
    """The only one who gives its engine plans. Model thread only."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._planner = Planner(engine.num_slots, engine.card.vocab_size)

    def slot_of(self, sequence: Sequence) -> int | None:
        """The engine's slot that has the sequence since its last step; None: it has lost it, or never had one."""
        return self._planner.slot_of(sequence)

    def step(self, rows: Seq[StepRow]) -> list[RowResult]:
        """Compute one ragged batch: write K/V of every row's tokens into its blocks, sample where a row ends.

        Sequences are not changed; the scheduler advances them afterwards. There is one result per row. Rows may mix prefill chunks
        and decode tokens in any order. Raises ValueError on a row of no tokens, or of more than its tokens or its block table hold
        (a scheduler's bug).
        """
        return self.launch(rows).wait()

    def launch(self, rows: Seq[StepRow], behind: LedStep | None = None) -> LedStep:
        """Begin a step and return before it is done. Steps run in the order of their launches; at most two are under way.

        ``behind``: the step that was launched before and not waited for, and not deferred any more; rows with ``num_ahead`` get
        their tokens from it. Until ``wait`` the blocks of all rows belong to the step, also those of sequences that meanwhile
        turned out to have ended. Raises as ``step``.
        """
        order = sorted(range(len(rows)), key=lambda index: rows[index].num_tokens > 1)
        ordered = [rows[index] for index in order]
        if not ordered:
            return LedStep(self._planner, (), {}, None)
        # A deferred one has no tokens to go on from, and its logits may lie where this step's will.
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
    """The row's result with those ``behind`` its draft's tokens, as long as each of them is what was sampled.

    What is sampled depends on seed, choice, position and the tokens in front only: these are the tokens of steps without a draft.
    """
    tokens = list(result.tokens)
    for token_id, following in zip(draft, behind, strict=True):
        if tokens[-1].token_id != token_id:
            break
        tokens += following.tokens
    return RowResult(tuple(tokens), result.prompt_logprobs)
