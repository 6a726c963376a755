"""Drafters that know the coming tokens, with a wrong token now and then."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from kvrelay.decode_worker.drafter import LookUp
from kvrelay.engine.fake.language import next_token, token_digests
from kvrelay.engine.fake.step import FakeSequence
from kvrelay.engine.step.sequence import Sequence


class Oracle(LookUp):
    """A drafter that is given the outputs in advance. Implements Drafter."""

    name = "oracle"
    num_trusted = 0

    def __init__(self, outputs: Mapping[str, Seq[int]], num_right: int = 4, vocab_size: int = 100) -> None:
        """``outputs``: by request id. About one token in ``num_right`` + 1 is replaced by another below
        ``vocab_size``."""
        self._outputs = outputs
        self._num_right = num_right
        self._vocab_size = vocab_size
        self._draws = random.Random(7)

    def foresee(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        start = sequence.num_output_tokens
        return self._mistaken(self._outputs[sequence.request_id][start : start + max_tokens])

    def forget(self, sequence: Sequence) -> None:
        pass

    def _mistaken(self, known: Seq[int]) -> tuple[int, ...]:
        is_right = [self._draws.randrange(self._num_right + 1) > 0 for _ in known]
        return tuple(one if right else (one + 1) % self._vocab_size for one, right in zip(known, is_right, strict=True))


class FakeOracle(Oracle):
    """A drafter that computes the tokens of fake engines in advance, without guides."""

    def __init__(self, vocab_size: int, num_right: int = 4) -> None:
        super().__init__({}, num_right, vocab_size)

    def foresee(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        digest = token_digests(sequence.token_ids)[-1]
        fake = FakeSequence("", list(sequence.token_ids), sequence.num_prompt_tokens, sequence.sampling, [])
        known: list[int] = []
        for _ in range(max_tokens):
            known.append(next_token(fake, digest, self._vocab_size))
            fake.token_ids.append(known[-1])
            digest = token_digests(known[-1:], digest)[-1]
        return self._mistaken(known)
