"""What every API does with a request before it runs: is the model here, is there room; text to tokens; wishes to parameters.

All APIs come together here. What goes in is a :class:`GenerationSpec` and a prompt, what comes out are generations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kvrelay.common.model_card import SharedLimits
from kvrelay.gateway.errors import InvalidRequestError, ModelNotFoundError, UnavailableError
from kvrelay.gateway.relay.progress import PromptShare
from kvrelay.gateway.relay.timings import RequestTimings
from kvrelay.gateway.routing.admission import Admission
from kvrelay.gateway.text.generation import Generation
from kvrelay.gateway.text.output_text import TextOptions
from kvrelay.gateway.text.spec import GenerationSpec, check_token_ids, sampling_params, word_ids
from kvrelay.gateway.text.tokenizer import Tokenizer
from kvrelay.gateway.workers.pool import WorkerPool

T = TypeVar("T")

_LONG = 4_000  # bytes of text, which take about 1 ms
_NO_NAMES = ("tgi", "dummy")  # what Hugging Face's clients send when nobody named a model


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """What is known of a request beside what it asks for. Over HTTP, ``apis/arrival.py`` tells it."""

    request_id: str  # nobody else's: workers go by ids
    received_s: float  # monotonic
    timeout_s: float | None = None  # what its client gives it
    min_priority: int | None = None  # that its API key allows; None: any


class Intake:
    """One model's, shared by all routes of a gateway, or by all requests of an executor."""

    def __init__(
        self, model_name: str, tokenizer: Tokenizer, pool: WorkerPool, admission: Admission, max_sequences: int
    ) -> None:
        """``max_sequences``: that one request may generate."""
        self._max_sequences = max_sequences
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.pool = pool
        self._admission = admission

    def check(self, model: str | None) -> None:
        """Raises ModelNotFoundError on another model's name, UnavailableError if a request could only be refused.

        To be called before any work goes into a request.
        """
        self.check_name(model)
        self.limits()
        self._admission.check_not_full()

    def check_name(self, model: str | None) -> None:
        """Raises ModelNotFoundError on another model's name."""
        if model is not None and model != self.model_name and model not in _NO_NAMES:
            raise ModelNotFoundError(
                f"model {model[:200]!r} is not served here; this deployment serves {self.model_name!r}", param="model"
            )

    def limits(self) -> SharedLimits:
        """What all workers that are up can do.

        Raises UnavailableError if none is, or if nobody is there who could serve: to wait for room then, as for a worker that
        is busy or lost, might be to wait for ever. So it may be after every await.
        """
        limits, absent = self.pool.limits, self.pool.absent
        if absent or limits is None:
            reasons = absent or [reason.split(" (")[0] for reason in self.pool.not_ready()]
            raise UnavailableError(f"{'; '.join(reasons)}; try again later", retry_after_s=1.0)
        return limits

    def system_fingerprint(self) -> str | None:
        """Equal as long as model, weights and number format are; None while no worker is up."""
        fingerprint = self.pool.fingerprint
        return None if fingerprint is None else f"fp_{fingerprint.hex()[:12]}"

    def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of a client's ``text``, at least one. Raises InvalidRequestError naming ``param``. Belongs :func:`aside`."""
        check_text(text, param)
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # A model cannot continue nothing; like other servers we let it continue an end of text.
        if not ids and not self.tokenizer.eos_ids:
            raise InvalidRequestError(f"{param} is empty: give at least one character", param=param)
        return ids or list(self.tokenizer.eos_ids[:1])

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raises InvalidRequestError on an id that the model does not have."""
        check_token_ids(token_ids, self.limits().vocab_size, param)

    def generations(
        self, arrival: Arrival, prompts: Sequence[Sequence[int]], spec: GenerationSpec, *, prompt_param: str
    ) -> list[Generation]:
        """All choices of all prompts, prompt by prompt. Raises InvalidRequestError, or ContextLengthError, naming the field."""
        self._check_num_sequences(len(prompts), spec)
        name = arrival.request_id
        priority = spec.priority if arrival.min_priority is None else max(spec.priority, arrival.min_priority)
        kept = [token_id for token in spec.kept_tokens if (token_id := self.tokenizer.token_id(token)) is not None]
        text = TextOptions(spec.stops, spec.includes_stop, spec.keeps_special, frozenset(kept))
        generations: list[Generation] = []
        limits = self.limits()
        bad_words = word_ids(spec.bad_words, self.tokenizer)
        for given in prompts:
            prompt = list(given if spec.truncate is None else given[-spec.truncate :])
            sampling = sampling_params(
                spec,
                num_prompt_tokens=len(prompt),
                limits=limits,
                eos_ids=self.tokenizer.eos_ids,
                bad_words=bad_words,
                prompt_param=prompt_param,
            )
            share = PromptShare() if len(sampling) > 1 else None
            for params in sampling:
                generations.append(
                    Generation(
                        request_id=f"{name}-{len(generations)}" if generations else name,
                        prompt_token_ids=prompt,
                        sampling=params,
                        text=text,
                        timings=RequestTimings(arrival.received_s),
                        timeout_s=arrival.timeout_s,
                        share=share,
                        is_silent=spec.max_tokens == 0,
                        priority=priority,
                        retention=spec.retention,
                        cache_salt=spec.cache_salt,
                        guide_param=spec.guide_param,
                    )
                )
        return generations

    def _check_num_sequences(self, num_prompts: int, spec: GenerationSpec) -> None:
        """Raises InvalidRequestError if one body asks for more than one may."""
        if spec.beam_search is None:
            param, per_prompt = (
                ("best_of", spec.best_of) if spec.best_of > spec.num_choices else ("n", spec.num_choices)
            )
        else:
            param, per_prompt = "beam_width", spec.beam_search.width
        if num_prompts * per_prompt > self._max_sequences:
            raise InvalidRequestError(
                f"{num_prompts} prompts times {param} {per_prompt} are {num_prompts * per_prompt} sequences; one request may ask "
                f"for {self._max_sequences}: send several",
                param=param,
            )


def check_text(text: str, param: str) -> None:
    """Raises InvalidRequestError on text that is no text: JSON escapes can spell half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} holds half of a surrogate pair (character {error.start}): not valid Unicode", param=param
        ) from error


async def aside(work: Callable[[], T], size: int) -> T:
    """What ``work`` makes of ``size`` bytes of a client's: on a thread if they are many, so that no stream waits for it."""
    return work() if size < _LONG else await asyncio.to_thread(work)
