"""Every control message of kvrelay, in one place, in the order of a request's life.

Messages are tagged msgspec structs in msgpack, one message per ZeroMQ frame. Times are durations in seconds; no message carries a
clock reading, since the clocks of two hosts differ.

How versions talk to each other (docs/compatibility.md): a field that is not known is ignored, one that is missing has its default,
so a new field has a default and a default never changes. A message of a type that is not known is dropped. A new type, or a new
meaning, needs a new protocol number. Both ends use the largest number that both speak (:func:`common_protocol`).

    gateway  → worker    Hello, Ping, Bye, KeyTokens, Distrust, Submit, Withdraw, Cancel
    worker   → gateway   Welcome | HelloRefused, Status, KeyTokens, Tokens, HandedOver, Preempted, Withdrawn, Failed, Cancelled
    prefill  → decode    Hello, Ping, Bye, Offer, Commit, Renew, Abort
    decode   → prefill   Welcome | HelloRefused, Status, Grant | Refuse, Verified | Reject

Each Submit ends in exactly one terminal answer per worker that took it: ``HandedOver`` (prefill only), a ``Tokens``
item with a finish reason, ``Withdrawn`` (prefill only), ``Failed`` or ``Cancelled``.
"""

from __future__ import annotations

import enum

import msgspec

from kvrelay.common.adapter_files import AdapterRef
from kvrelay.common.fair_queue import Flow
from kvrelay.common.model_card import KvLayout, ModelCard
from kvrelay.common.retention import Retention
from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams

PROTOCOL_MIN, PROTOCOL_MAX = 1, 1  # the numbers that this build speaks, from the oldest to its own

ABOUT_GUIDE = "guide"  # the sampling parameters' guide, whichever field of a client's request it came from


class Role(enum.StrEnum):
    """Who speaks."""

    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(enum.StrEnum):
    """What a worker will take."""

    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    WRONG = "wrong"  # its answers to a known prompt changed: computes nothing any more, and ends

    @classmethod
    def _missing_(cls, value: object) -> WorkerState:
        """A state of a newer version: it gets nothing new."""
        return cls.DRAINING


class FailureCode(enum.StrEnum):
    """Why an attempt failed or an offer was refused. ``is_fault`` says whether somebody is broken."""

    NO_ROOM = "no_room"  # no free KV blocks now
    QUEUE_FULL = "queue_full"  # the worker's waiting queue is at its bound
    DRAINING = "draining"
    PEER_LOST = "peer_lost"  # the other worker does not answer
    LAYOUT_MISMATCH = "layout_mismatch"  # the two workers' KV does not fit each other
    INTEGRITY = "integrity"  # a block's checksum, hash, position or epoch was wrong
    LEASE_EXPIRED = "lease_expired"
    DEADLINE = "deadline"  # the request's time ran out
    INVALID = "invalid"  # the request can never be served here
    CANCELLED = "cancelled"
    NO_ADAPTER = "no_adapter"  # the worker has not got the request's adapter, nor room for it, now
    NOT_CACHED = "not_cached"  # more of the prompt would have to be computed here than Submit allows
    INTERNAL = "internal"  # an unexpected error on the worker; its log has the trace

    @classmethod
    def _missing_(cls, value: object) -> FailureCode:
        """A code of a newer version. An attempt whose end nobody could read would never end."""
        return cls.INTERNAL

    @property
    def is_fault(self) -> bool:
        """Whether somebody is broken; else there is only no room, or no time, or nothing cached."""
        faults = (
            FailureCode.PEER_LOST,
            FailureCode.LAYOUT_MISMATCH,
            FailureCode.INTEGRITY,
            FailureCode.LEASE_EXPIRED,
            FailureCode.INTERNAL,
        )
        return self in faults


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages: the class name is the tag."""


# -- a connection begins ------------------------------------------------------------------------------------------


class Hello(_Message, tag=True, frozen=True, kw_only=True):
    """First message on every connection. ``peer_id`` is the sender's name, nobody else's among its role."""

    role: Role
    peer_id: str
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    layout: KvLayout | None = None  # of a prefill worker; a gateway has none
    seals_kv: bool = False  # of a prefill worker: it sends sealed blocks, and only those


def common_protocol(hello: Hello) -> int | None:
    """The largest protocol number that the sender and this build speak; None if there is none."""
    newest = min(hello.protocol_max, PROTOCOL_MAX)
    return newest if newest >= max(hello.protocol_min, PROTOCOL_MIN) else None


class Welcome(_Message, tag=True, frozen=True, kw_only=True):
    """The worker accepts. ``epoch`` differs for every start of the process: what was promised before is void."""

    role: Role
    worker_id: str
    epoch: int
    protocol: int  # of this connection
    card: ModelCard
    model: str = ""  # its name in the API; "": the operator did not tell the worker
    data_address: str | None = None  # decode only: where KV blocks go; a host of 0.0.0.0 means "as you reached me"
    data_token: str | None = None  # decode to prefill only: what its data socket lets connections in by; None: all
    shared_memory: str | None = None  # decode to prefill only: name of the socket that takes shared memory on its host


def worker_peer_id(worker_id: str, epoch: int) -> str:
    """``peer_id`` of a prefill worker's Hello: another one for every start of the process."""
    return f"{worker_id}-{epoch}"


class HelloRefused(_Message, tag=True, frozen=True, kw_only=True):
    """The worker does not talk to this peer; ``detail`` names both sides of the disagreement."""

    code: FailureCode
    detail: str


class Ping(_Message, tag=True, frozen=True, kw_only=True):
    """Keeps the sender alive in the receiver's eyes; answered by ``Status``."""


class Bye(_Message, tag=True, frozen=True, kw_only=True):
    """The sender leaves; what it asked for is void."""


class Status(_Message, tag=True, frozen=True, kw_only=True):
    """A worker's state, what routing policies see."""

    state: WorkerState
    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # uncomputed tokens of waiting and running prompts
    num_free_blocks: int  # free and cached: what could be allocated now
    num_blocks: int
    max_running: int  # sequences that compute at a time
    # Of prompts, what it would compute now: a decode worker within its inter-token budget, beside what runs there. None: not known
    # yet; 0: nothing is left of the budget.
    prompt_tokens_per_s: float | None = None
    adapters: list[str] = []  # digests of those that are loaded
    num_arriving: int = 0  # of num_waiting: sequences whose blocks are on their way here


class Distrust(_Message, tag=True, frozen=True, kw_only=True):
    """To decode workers: this start of a prefill worker computed wrongly. What it shipped is dropped, and no more is taken."""

    peer_id: str  # as in its Hello


class KeyTokens(_Message, tag=True, frozen=True, kw_only=True):
    """What one gateway's requests have used of their API keys' token budgets. Workers pass it on to all other gateways."""

    gateway: str  # its process: it may have several links, each with a ``peer_id``
    number: int  # a later one of the same gateway is larger
    used: dict[str, tuple[int, int]]  # by the name of a key: in the last minute and day, and what is reserved
    age_s: float = 0.0  # how long a worker has kept it


# -- a request ----------------------------------------------------------------------------------------------------


class DecodeTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The decode worker that the gateway chose."""

    address: str  # of its control socket


class Submit(_Message, tag=True, frozen=True, kw_only=True, omit_defaults=True):
    """Compute a request: prefill and hand over to ``decode``, or all of it here (local prefill) without one.

    ``token_ids`` holds the prompt, and behind it the output of earlier attempts if there were any; the worker goes on
    from there, with the same sampling noise as if nothing had happened.
    """

    request_id: str
    attempt: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    decode: DecodeTarget | None = None
    timeout_s: float | None = None  # what is left of the request's time; afterwards nobody waits for it
    retention: Retention | None = None  # how long its blocks should stay cached
    cache_salt: str = ""  # only requests with the same one share cached blocks
    adapter: AdapterRef | None = None  # what computes it; None: the model as it is
    flow: Flow = Flow()
    max_uncached_tokens: int | None = None  # of local prefill: refused if more must be computed (``NOT_CACHED``)
    trace_id: str = ""  # stands in log lines; not empty: the request is traced, and its chunks are told


class Withdraw(_Message, tag=True, frozen=True, kw_only=True):
    """Give the attempt back if its prompt has not begun, answered by ``Withdrawn``; else it goes on, and there is no answer."""

    request_id: str
    attempt: int


class Cancel(_Message, tag=True, frozen=True, kw_only=True):
    """Give the attempt up, whatever its state; answered by ``Cancelled``, also if the worker does not know it."""

    request_id: str
    attempt: int


class PromptChunk(msgspec.Struct, frozen=True, array_like=True):
    """What one step computed of a prompt."""

    begun_s: float  # since the first chunk started
    duration_s: float
    num_tokens: int


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parts of the time to first token and of the hand-off, each measured on one worker's monotonic clock."""

    queue_s: float | None = None  # arrival until the first chunk started
    prefill_s: float | None = None  # first chunk started until the first token was sampled
    transfer_s: float | None = None  # commit received until every block was verified
    first_step_s: float | None = None  # verified until the first decode step's token
    chunks: list[PromptChunk] = []  # of prefill_s, if the request is traced: the first ones


class Beam(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence that a beam search found."""

    tokens: list[SampledToken]  # of the output
    finish_reason: FinishReason
    score: float  # log probability / length ** length_penalty


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one attempt; ``index`` is the output position of the first, counted from 0 over all attempts.

    A decode worker repeats the first token that the prefill worker already sent: its stream is complete in itself,
    and the gateway drops what it has.
    """

    request_id: str
    attempt: int
    index: int
    tokens: list[SampledToken]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None  # of the prompt, with an attempt's first tokens
    timings: Timings | None = None
    prompt_logprobs: list[SampledToken] | None = None  # of its tokens but the first, with the first token
    beams: list[Beam] | None = None  # of a beam search: its result, with the finish reason; there are no tokens before


class Tokens(_Message, tag=True, frozen=True, kw_only=True):
    """All new tokens of one step for one gateway."""

    items: list[TokenDelta]


class HandedOver(_Message, tag=True, frozen=True, kw_only=True):
    """The decode worker has verified the KV and owns the request; the prefill worker is done with it."""

    request_id: str
    attempt: int


class Preempted(_Message, tag=True, frozen=True, kw_only=True):
    """A decode worker had no room for the attempt any more; it goes on when there is, if nobody cancels it before."""

    request_id: str
    attempt: int


class Withdrawn(_Message, tag=True, frozen=True, kw_only=True):
    """The attempt is over before its prompt began, as the gateway asked; no other worker has heard of it."""

    request_id: str
    attempt: int


class Failed(_Message, tag=True, frozen=True, kw_only=True):
    """The attempt is over and left nothing behind."""

    request_id: str
    attempt: int
    code: FailureCode
    detail: str
    retry_after_s: float | None = None
    about: str | None = None  # what of the request is at fault, if the worker says: ABOUT_GUIDE; others may come


class Cancelled(_Message, tag=True, frozen=True, kw_only=True):
    """The attempt is over because it was cancelled; its blocks are back."""

    request_id: str
    attempt: int


# -- the hand-off -------------------------------------------------------------------------------------------------


class Offer(_Message, tag=True, frozen=True, kw_only=True, omit_defaults=True):
    """A prefill worker started a request and asks for room. The decode worker checks the hashes against the tokens."""

    request_id: str
    attempt: int
    gateway_id: str  # ``peer_id`` of the gateway that waits for the tokens
    fingerprint: bytes
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_hashes: list[bytes]  # of all blocks, the last one maybe partial
    timeout_s: float | None = None  # as in Submit
    retention: Retention | None = None  # as in Submit
    cache_salt: str = ""  # as in Submit
    trace_id: str = ""  # as in Submit
    adapter: AdapterRef | None = None  # as in Submit
    flow: Flow = Flow()


class Grant(_Message, tag=True, frozen=True, kw_only=True):
    """Room is reserved until ``ttl_s`` after the last traffic for the lease."""

    request_id: str
    attempt: int
    lease_id: int
    epoch: int
    num_cached_blocks: int  # leading blocks that need not be sent
    ttl_s: float
    seal_key: bytes | None = None  # AES-256 key of this lease's blocks; None: they travel plain


class Refuse(_Message, tag=True, frozen=True, kw_only=True):
    """No lease; nothing is reserved."""

    request_id: str
    attempt: int
    code: FailureCode
    detail: str
    retry_after_s: float | None = None


class Commit(_Message, tag=True, frozen=True, kw_only=True):
    """All blocks are sent (maybe still on their way). ``chain_hash`` is the last block's hash."""

    lease_id: int
    epoch: int
    chain_hash: bytes
    first_token: SampledToken
    num_cached_tokens: int  # of the prompt, in the prefill worker's cache


class Verified(_Message, tag=True, frozen=True, kw_only=True):
    """Every block proved right; the decode worker owns the sequence and the sender may reuse its blocks."""

    lease_id: int
    epoch: int


class Reject(_Message, tag=True, frozen=True, kw_only=True):
    """The lease is over, its blocks are back; nothing was sampled from them."""

    lease_id: int
    epoch: int
    code: FailureCode
    detail: str


class Renew(_Message, tag=True, frozen=True, kw_only=True):
    """The prefill worker still computes; the lease's time starts anew."""

    lease_id: int
    epoch: int


class Abort(_Message, tag=True, frozen=True, kw_only=True):
    """The prefill worker gives the lease up and sends no more blocks for it."""

    lease_id: int
    epoch: int
    reason: str


Message = (
    Hello | Welcome | HelloRefused | Ping | Bye | Status | KeyTokens | Distrust
    | Submit | Withdraw | Cancel | Tokens | HandedOver | Preempted | Withdrawn | Failed | Cancelled
    | Offer | Grant | Refuse | Commit | Verified | Reject | Renew | Abort
)  # fmt: skip
