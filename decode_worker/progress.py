"""What a step brought one request of a decode worker, as its service hears of it: values, for the sequence goes on."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.engine.beams.search import FinishedBeam
from kvrelay.engine.step.sequence import Sequence
from kvrelay.worker.suspects import Key


@dataclass(frozen=True, slots=True)
class Progress:
    """One token, or what a beam search has to tell."""

    key: Key
    token: SampledToken | None  # None: of a beam search, that it has begun or, with its ``beams``, ended
    finish_reason: FinishReason | None
    num_cached_tokens: int
    beams: tuple[FinishedBeam, ...] = ()
    failure: str | None = None  # why it ended without a reason to finish: the token does not count
    prompt_logprobs: list[SampledToken] | None = None  # if the sequence was prefilled here and asks for them

    @classmethod
    def of(
        cls, sequence: Sequence, token: SampledToken | None = None, beams: tuple[FinishedBeam, ...] = ()
    ) -> Progress:
        """Of a sequence that has its token already; of a beam search, the leader."""
        return cls(
            key=sequence.key,
            token=token,
            finish_reason=sequence.finish_reason,
            num_cached_tokens=min(sequence.num_cached_tokens, sequence.num_prompt_tokens),
            beams=beams,
            failure=sequence.failure,
            prompt_logprobs=None if sequence.sampling.num_prompt_logprobs is None else sequence.prompt_logprobs,
        )
