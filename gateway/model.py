"""A model as a gateway serves it. Everything in the gateway that depends on a model is here.

Several models behind one gateway are several objects. :class:`Models` finds the one that a request's ``model`` names.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvrelay.common.adapter_files import AdapterRef
from kvrelay.common.fair_queue import Flow
from kvrelay.common.images import PromptImage
from kvrelay.common.model_card import SharedLimits
from kvrelay.gateway.adapters import AdapterRegistry
from kvrelay.gateway.chat.dialect import Dialect
from kvrelay.gateway.chat.template import ChatTemplate
from kvrelay.gateway.errors import InvalidRequestError, ModelNotFoundError, UnavailableError
from kvrelay.gateway.model_names import Alias
from kvrelay.gateway.relay.relay import Relay
from kvrelay.gateway.relay.request import GenerationRequest, GenerationSpec, PromptShare, RequestTimings
from kvrelay.gateway.routing.split import share_of
from kvrelay.gateway.text.output import Output, TextDelta, Usage
from kvrelay.gateway.text.sampling import check_token_ids, sampling_params, word_ids
from kvrelay.gateway.text.tokenizer import Tokenizer, check_text
from kvrelay.gateway.workers.pool import WorkerPool

_MAX_NAMED = 50  # names listed in an error
_NO_NAMES = ("tgi", "dummy")  # Hugging Face's clients send these if no model was named

TakeNumbered = Callable[[int, TextDelta], None]
"""Takes new text of a sequence, with the sequence's number. Must not wait."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model's directory that a gateway reads."""

    tokenizer: Tokenizer
    template: ChatTemplate
    dialect: Dialect

    @classmethod
    def load(cls, directory: Path, tool_parser: str = "auto", reasoning_parser: str = "auto") -> ModelFiles:
        """Read the files. Raises ModelError if the tokenizer or the chat template cannot be read."""
        tokenizer = Tokenizer.load(directory)
        template = ChatTemplate.load(directory, tokenizer.special_tokens)
        return cls(tokenizer, template, Dialect.of(template.source, tool_parser, reasoning_parser))


class Model:
    """One model: its name, its files, and the workers that compute it. All routes share it, or all requests of an executor."""

    def __init__(self, name: str, files: ModelFiles, relay: Relay) -> None:
        self.name = self.base_name = name  # they differ if there is an adapter
        self.tokenizer = files.tokenizer
        self.template = files.template
        self.dialect = files.dialect
        self.relay = relay
        self.adapter: AdapterRef | None = None  # applies to all requests of this object

    def adapted(self, adapter: AdapterRef) -> Model:
        """The same model with an adapter, under the adapter's name."""
        model = copy.copy(self)
        model.name, model.adapter = adapter.name, adapter
        return model

    @property
    def pool(self) -> WorkerPool:
        """The model's workers."""
        return self.relay.pool

    @property
    def is_up(self) -> bool:
        """Whether some workers can generate."""
        return not self.pool.absent and self.pool.limits is not None

    def check(self, flow: Flow) -> None:
        """Raises UnavailableError if a request of ``flow`` would be refused. Call it before any work is done for the request."""
        self.limits()
        self.relay.admission.check_not_full(flow)

    def limits(self) -> SharedLimits:
        """The limits that all running workers share.

        Raises UnavailableError if no worker is up, or if a role has no worker at all, because a request could then wait forever.
        This can change at every await. Workers that are down are looked for soon.
        """
        limits, absent = self.pool.limits, self.pool.absent
        if absent or limits is None:
            self.pool.hurry(self.pool.workers)
            reasons = absent or self.pool.public_reasons
            raise UnavailableError(f"model {self.name!r}: {'; '.join(reasons)}; try again later", retry_after_s=1.0)
        return limits

    def system_fingerprint(self) -> str | None:
        """A text that is equal while model, weights, number format and adapter are. None while no worker is up."""
        fingerprint, adapter = self.pool.fingerprint, "" if self.adapter is None else f"_{self.adapter.digest[:12]}"
        return None if fingerprint is None else f"fp_{fingerprint.hex()[:12]}{adapter}"

    def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of a client's ``text``, at least one. Long texts belong on a thread.

        Raises InvalidRequestError naming ``param``.
        """
        check_text(text, param)
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # A model cannot continue an empty prompt. Like other servers, we let it continue an end of text.
        if not ids and not self.tokenizer.eos_ids:
            raise InvalidRequestError(f"{param} is empty: give at least one character", param=param)
        return ids or list(self.tokenizer.eos_ids[:1])

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raises InvalidRequestError if the model does not have one of the ids."""
        check_token_ids(token_ids, self.limits().vocab_size, param)

    def sequences(
        self,
        prompts: Sequence[Sequence[int]],
        spec: GenerationSpec,
        *,
        request_id: str,
        received_s: float,
        prompt_param: str,
        timeout_s: float,
        flow: Flow,
        trace_id: str = "",
        images: tuple[PromptImage, ...] = (),
    ) -> list[GenerationRequest]:
        """All choices of all prompts, prompt by prompt.

        ``request_id``: must be unique, because workers identify requests by it. ``received_s``: on the relay's clock.
        ``prompt_param``: the name of the prompts' field. ``timeout_s``: the client's timeout. ``flow``: the requests' flow.
        ``trace_id``: of the trace that records them; empty: none. ``images``: of each prompt.
        Raises InvalidRequestError or ContextLengthError naming the field.
        """
        if images and spec.truncate is not None:
            raise InvalidRequestError(
                "truncate_prompt_tokens might cut an image in two; leave it out, or send no images",
                param="truncate_prompt_tokens",
            )
        self._check_num_sequences(len(prompts), spec)
        limits = self.limits()
        bad_words = word_ids(spec.bad_words, self.tokenizer)
        sequences: list[GenerationRequest] = []
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
                name = f"{request_id}-{len(sequences)}" if sequences else request_id
                timings = RequestTimings(received_s, prepared_s=self.relay.clock())
                sequences.append(
                    GenerationRequest(
                        name,
                        prompt,
                        params,
                        timings,
                        spec,
                        timeout_s,
                        share,
                        flow,
                        trace_id=trace_id,
                        adapter=self.adapter,
                        images=images,
                    )
                )
        return sequences

    async def run(self, sequences: Sequence[GenerationRequest], usages: Sequence[Usage], take: TakeNumbered) -> None:
        """Generate ``sequences`` concurrently. ``take`` gets the numbered text of all; ``usages`` are filled. Raises ApiError.

        ``take`` is called as tokens arrive and must not wait. The last text of each sequence has a finish reason. The first error
        ends all sequences, also an error of ``take``. Cancel to give them up.
        """
        runs = [
            self._run(sequence, usage, partial(take, index))
            for index, (sequence, usage) in enumerate(zip(sequences, usages, strict=True))
        ]
        if len(runs) == 1:
            await runs[0]
            return
        tasks = [asyncio.create_task(run) for run in runs]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, sequence: GenerationRequest, usage: Usage, take: Callable[[TextDelta], None]) -> None:
        output = Output(sequence, usage, take, self.tokenizer, self.relay.metrics, self.relay.clock)
        await self.relay.run(sequence, output.take)

    def _check_num_sequences(self, num_prompts: int, spec: GenerationSpec) -> None:
        """Raises InvalidRequestError if one body asks for too many sequences."""
        limit = self.relay.settings.max_sequences
        param, per_prompt = ("best_of", spec.best_of) if spec.best_of > spec.num_choices else ("n", spec.num_choices)
        if spec.beam_search is not None:
            param, per_prompt = "beam_width", spec.beam_search.width
        if num_prompts * per_prompt > limit:
            raise InvalidRequestError(
                f"{num_prompts} prompts times {param} {per_prompt} are {num_prompts * per_prompt} sequences; one request may ask "
                f"for {limit}: send several",
                param=param,
            )


class Models:
    """The models behind one gateway (at least one), their names and aliases, and their adapters."""

    def __init__(
        self,
        models: Sequence[Model],
        adapters: Mapping[str, AdapterRegistry] | None = None,
        aliases: Sequence[Alias] = (),
        default: str | None = None,
    ) -> None:
        """``adapters``: registries by model name, for models that have adapters. ``default``: a model or an alias for requests that
        name none; None: the first model.
        """
        self._models = list(models)
        by_name = {model.name: model for model in models}
        self._shares: dict[str, list[tuple[Model, float]]] = {model.name: [(model, 1.0)] for model in models}
        for alias in aliases:
            self._shares[alias.name] = [(by_name[name], weight) for name, weight in alias.weights]
        self._default = default or self._models[0].name
        # In the order of models: if two adapters have one name, the first model's counts.
        self._adapters = {name: adapters[name] for name in by_name if name in adapters} if adapters else {}

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models)

    def __contains__(self, name: object) -> bool:
        return name in self._shares or any(name in registry.refs for registry in self._adapters.values())

    def has_own(self, name: str) -> bool:
        """Whether a model or an alias has that name. An adapter of that name is never found."""
        return name in self._shares

    @property
    def names(self) -> list[str]:
        """All names that a request may use: models, aliases, adapters. An earlier one hides a later one of the same name."""
        adapters = [name for registry in self._adapters.values() for name in registry.refs]
        return list(dict.fromkeys([*self._shares, *adapters]))

    @property
    def adapters(self) -> Mapping[str, AdapterRegistry]:
        """The adapter registries by model name, in the order of models."""
        return self._adapters

    def find(self, name: str | None, conversation: Callable[[], str] = str) -> Model:
        """The model that a request names, or the default one. Raises ModelNotFoundError.

        ``conversation``: a key that the requests of one conversation share. It is called only if an alias stands for several
        models. Without it, all requests belong to one conversation.
        """
        if name is None or (name in _NO_NAMES and name not in self):
            name = self._default
        shares = self.shares(name)
        if len(shares) == 1:
            return shares[0][0]
        return shares[share_of(conversation(), name, [weight for _, weight in shares])][0]

    def shares(self, name: str) -> Sequence[tuple[Model, float]]:
        """The models that a name stands for, and the weight of each. Raises ModelNotFoundError."""
        if name in self._shares:
            return self._shares[name]
        for model, registry in self._adapters.items():
            if (adapter := registry.refs.get(name)) is not None:
                return [(self._shares[model][0][0].adapted(adapter), 1.0)]
        served = ", ".join(map(repr, self.names[:_MAX_NAMED]))
        raise ModelNotFoundError(
            f"model {name[:200]!r} is not served here; this deployment serves {served}", param="model"
        )
