"""A request that arrives: whether a worker takes it, and the sequence that it becomes. The same for both roles."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvrelay.common.block_hash import MAX_CACHE_SALT, HashChain
from kvrelay.common.images import ImageSpan, spans_problem
from kvrelay.common.model_card import ModelCard
from kvrelay.common.sampling_check import invalid_sampling
from kvrelay.engine.beams.check import invalid_beams, unfit_beams
from kvrelay.engine.step.sequence import PromptTrace, Sequence
from kvrelay.wire.messages import ABOUT_GUIDE, ABOUT_IMAGES, Failed, FailureCode, Offer, Status, Submit, WorkerState


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """A worker's name, and the model and limits that it serves with."""

    worker_id: str
    epoch: int  # differs for every start of the process
    card: ModelCard
    max_waiting: int  # requests that may wait; one more is refused
    max_running: int  # sequences that compute at a time
    model: str = ""  # name in the API; "": none
    max_step_tokens: int | None = None  # prompt tokens of the largest step; None: no limit


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a worker does not take a request now, or ever."""

    code: FailureCode
    detail: str
    retry_after_s: float | None = None


def refusal_of(
    request: Submit | Offer, identity: WorkerIdentity, status: Status, *, is_known: bool, decodes: bool
) -> Refusal | None:
    """Why the worker does not take the request; None if it does. ``decodes``: whether it would generate the output."""
    # Offers are checked again here: a step that breaks on one sequence can end all sequences in the batch.
    invalid = invalid_submit(request, identity.card)
    if invalid is None and decodes:
        invalid = unfit_beams(request.sampling, request.num_prompt_tokens, identity.card, identity.max_running)
    if not decodes and isinstance(request, Submit) and request.decode is None:
        invalid = "a prefill worker needs a decode worker to hand over to"
    if is_known:
        invalid = f"attempt {request.attempt} of request {request.request_id} is already here"
    if invalid is not None:
        return Refusal(FailureCode.INVALID, invalid)
    if request.timeout_s is not None and not request.timeout_s > 0:  # NaN counts as late
        return Refusal(FailureCode.DEADLINE, f"came with {request.timeout_s} s left: nobody waits for it any more")
    if status.state is WorkerState.DRAINING:
        return Refusal(FailureCode.DRAINING, f"worker {identity.worker_id} is shutting down")
    if status.state is WorkerState.WRONG:
        return Refusal(FailureCode.INTERNAL, f"worker {identity.worker_id} computes wrongly")
    if status.num_waiting >= identity.max_waiting:
        return Refusal(FailureCode.QUEUE_FULL, f"{status.num_waiting} requests wait already", retry_after_s=1.0)
    return None


def guide_failed(key: tuple[str, int], detail: str, *, is_invalid: bool = True) -> Failed:
    """The outcome of attempt ``key`` when its guide fails. ``is_invalid``: the guide is wrong, so other workers would fail too."""
    code = FailureCode.INVALID if is_invalid else FailureCode.INTERNAL
    return Failed(request_id=key[0], attempt=key[1], code=code, detail=detail, about=ABOUT_GUIDE)


def images_failed(key: tuple[str, int], detail: str, *, is_invalid: bool) -> Failed:
    """The outcome of attempt ``key`` when its images cannot be read. ``is_invalid``: other workers could not either."""
    code = FailureCode.INVALID if is_invalid else FailureCode.INTERNAL
    return Failed(request_id=key[0], attempt=key[1], code=code, detail=detail, about=ABOUT_IMAGES)


def spans_of(request: Submit | Offer) -> list[ImageSpan]:
    """Where the prompt's images are."""
    return request.images if isinstance(request, Offer) else [image.span for image in request.images]


def invalid_submit(submit: Submit | Offer, card: ModelCard) -> str | None:
    """Why no worker with this card can ever compute the request, naming value and limit; None if it can."""
    num_tokens = len(submit.token_ids)
    if not 0 < submit.num_prompt_tokens <= num_tokens:
        return f"num_prompt_tokens is {submit.num_prompt_tokens}; it must be 1 to {num_tokens}"
    if num_tokens >= card.max_model_len:
        return f"{num_tokens} tokens leave no room to generate: the limit is {card.max_model_len} tokens"
    if not all(0 <= token_id < card.vocab_size for token_id in submit.token_ids):
        return f"a token id lies outside of 0 to {card.vocab_size - 1}"
    if len(submit.cache_salt) > MAX_CACHE_SALT:
        return f"cache_salt has {len(submit.cache_salt)} characters; it must have at most {MAX_CACHE_SALT}"
    problems = [part.problem() for part in (submit.retention, submit.flow) if part is not None]
    problems.append(spans_problem(spans_of(submit), submit.num_prompt_tokens))
    if (problem := next(filter(None, problems), None)) is not None:
        return problem
    sampling, num_prompt_tokens = submit.sampling, submit.num_prompt_tokens
    return invalid_sampling(sampling, num_prompt_tokens, card) or invalid_beams(
        sampling, num_prompt_tokens, num_tokens, card
    )


def chain_of(request: Submit | Offer, block_size: int, fingerprint: bytes) -> HashChain:
    """The hash chain of the request's blocks. ``fingerprint``: of the worker's layout."""
    return HashChain(
        fingerprint,
        block_size,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        images=spans_of(request),
    )


def sequence_of(request: Submit | Offer, chain: HashChain, now_s: float, *, has_whole_images: bool) -> Sequence:
    """A new sequence for the request, with arrival time ``now_s`` and no token computed. ``chain``: of its blocks."""
    return Sequence(
        request_id=request.request_id,
        attempt=request.attempt,
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        arrival_s=now_s,
        retention=request.retention,
        flow=request.flow,
        deadline_s=math.inf if request.timeout_s is None else now_s + request.timeout_s,
        chain=chain,
        trace=PromptTrace(request.trace_id, len(request.token_ids)) if request.trace_id else None,
        spans=spans_of(request),
        has_whole_images=has_whole_images,
    )
