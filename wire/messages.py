"""All control messages of kvrelay, in the order of a request's life.

Messages are tagged msgspec structs in msgpack, one message per ZeroMQ frame. Times are durations in seconds; no message carries a
clock reading, because the clocks of two hosts differ.

Compatibility between versions (docs/compatibility.md): a receiver ignores unknown fields, and uses the default of a missing field.
So a new field has a default, and a default never changes. A receiver drops messages of an unknown type. A new type or a new meaning
needs a new protocol number. Both ends use the largest number that both speak (:func:`common_protocol`).

    gateway  → worker    Hello, Ping, Bye, KeyTokens, Distrust, AskImages, Submit, Withdraw, Cancel
    worker   → gateway   Welcome | HelloRefused, Status, KeyTokens, ImagesTold, Tokens, HandedOver, Preempted, Withdrawn, Failed,
                         Cancelled
    prefill  → decode    Hello, Ping, Bye, Offer, Commit, Renew, Abort
    decode   → prefill   Welcome | HelloRefused, Status, Grant | Refuse, Verified | Reject

Each Submit ends in exactly one final answer per worker that accepted it: ``HandedOver`` (prefill only), a ``Tokens`` item with a
finish reason, ``Withdrawn`` (prefill only), ``Failed`` or ``Cancelled``.
"""

from __future__ import annotations

import enum

import msgspec

from kvrelay.common.adapter_files import AdapterRef
from kvrelay.common.fair_queue import Flow
from kvrelay.common.images import ImageSpan, ImageTexts, PromptImage
from kvrelay.common.model_card import KvLayout, ModelCard
from kvrelay.common.retention import Retention
from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams

PROTOCOL_MIN, PROTOCOL_MAX = 1, 1  # oldest and newest number that this build speaks

# Values of ``Failed.about``.
ABOUT_GUIDE = "guide"  # the sampling parameters' guide
ABOUT_IMAGES = "images"


class Role(enum.StrEnum):
    """The kind of process that sends a message."""

    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(enum.StrEnum):
    """Whether a worker takes new requests."""

    READY = "ready"
    DRAINING = "draining"  # finishes its requests, takes no new ones
    WRONG = "wrong"  # its answer to a known prompt changed: it stops computing, and ends

    @classmethod
    def _missing_(cls, value: object) -> WorkerState:
        """Read a state of a newer version as DRAINING, so that the worker gets no new requests."""
        return cls.DRAINING


class FailureCode(enum.StrEnum):
    """Why an attempt failed or an offer was refused."""

    NO_ROOM = "no_room"  # no free KV blocks now
    QUEUE_FULL = "queue_full"  # the worker's waiting queue is at its bound
    DRAINING = "draining"
    PEER_LOST = "peer_lost"  # the other worker does not answer
    LAYOUT_MISMATCH = "layout_mismatch"  # the KV layouts of the two workers differ
    INTEGRITY = "integrity"  # a block's checksum, hash, position or epoch was wrong
    LEASE_EXPIRED = "lease_expired"
    DEADLINE = "deadline"  # the request's time ran out
    INVALID = "invalid"  # the request can never be served here
    CANCELLED = "cancelled"
    NO_ADAPTER = "no_adapter"  # the worker lacks the request's adapter and has no room for it now
    NOT_CACHED = "not_cached"  # the worker would compute more of the prompt than Submit allows
    INTERNAL = "internal"  # an unexpected error on the worker; its log has the trace

    @classmethod
    def _missing_(cls, value: object) -> FailureCode:
        """Read a code of a newer version as INTERNAL. Otherwise the attempt would never end."""
        return cls.INTERNAL

    @property
    def is_fault(self) -> bool:
        """Whether a component is broken. False for mere lack of room, time or cached blocks."""
        faults = (
            FailureCode.PEER_LOST,
            FailureCode.LAYOUT_MISMATCH,
            FailureCode.INTEGRITY,
            FailureCode.LEASE_EXPIRED,
            FailureCode.INTERNAL,
        )
        return self in faults


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of all messages: the class name is the tag."""


class _OfAttempt(_Message, frozen=True, kw_only=True):
    """Base of the messages about one attempt at a request."""

    request_id: str
    attempt: int

    @property
    def key(self) -> tuple[str, int]:
        """The attempt's name."""
        return (self.request_id, self.attempt)


class _OfLease(_Message, frozen=True, kw_only=True):
    """Base of the messages about one lease. ``epoch``: that of the decode worker, in its Welcome."""

    lease_id: int
    epoch: int


# -- a connection begins ------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, kw_only=True):
    """First message on every connection. ``peer_id`` is the sender's name, unique within its role."""

    role: Role
    peer_id: str
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    layout: KvLayout | None = None  # of a prefill worker; None for a gateway
    seals_kv: bool = False  # of a prefill worker: it sends only sealed blocks


def common_protocol(hello: Hello) -> int | None:
    """The largest protocol number that the sender and this build speak; None if there is none."""
    newest = min(hello.protocol_max, PROTOCOL_MAX)
    return newest if newest >= max(hello.protocol_min, PROTOCOL_MIN) else None


class Welcome(_Message, frozen=True, kw_only=True):
    """The worker accepts. ``epoch`` differs for every start of the process; promises of an earlier epoch are void."""

    role: Role
    worker_id: str
    epoch: int
    protocol: int  # of this connection
    card: ModelCard
    model: str = ""  # its name in the API; "": not configured
    data_address: str | None = None  # decode only: the data socket; host 0.0.0.0 means the host of this connection
    data_token: str | None = None  # decode to prefill only: token for the data socket; None: it needs none
    shared_memory: str | None = None  # decode to prefill only: socket for shared memory on the host


def worker_peer_id(worker_id: str, epoch: int) -> str:
    """``peer_id`` of a prefill worker's Hello, different for every start of the process."""
    return f"{worker_id}-{epoch}"


class HelloRefused(_Message, frozen=True, kw_only=True):
    """The worker refuses the peer. ``detail`` names both sides of the disagreement."""

    code: FailureCode
    detail: str


class Ping(_Message, frozen=True, kw_only=True):
    """Shows that the sender is alive. The receiver answers with ``Status``."""


class Bye(_Message, frozen=True, kw_only=True):
    """The sender leaves. All its requests are void."""


class Status(_Message, frozen=True, kw_only=True):
    """A worker's state, as routing policies see it."""

    state: WorkerState
    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # uncomputed tokens of waiting and running prompts
    num_free_blocks: int  # blocks that could be allocated now: free and cached ones
    num_blocks: int
    max_running: int  # most sequences that compute at a time
    # Prompt tokens per second that the worker would compute now: a decode worker within its inter-token budget, beside its
    # running sequences. None: not known yet; 0: the budget has nothing left.
    prompt_tokens_per_s: float | None = None
    adapters: list[str] = []  # digests of the loaded adapters
    num_arriving: int = 0  # the part of ``num_waiting`` whose blocks are on their way here


class Distrust(_Message, frozen=True, kw_only=True):
    """One start of a prefill worker computed wrongly. Decode workers drop the KV that it shipped and take no more from it."""

    peer_id: str  # as in its Hello


class KeyTokens(_Message, frozen=True, kw_only=True):
    """What one gateway's requests have used of their API keys' token budgets. A worker passes it on to all other gateways."""

    gateway: str  # the gateway's process, which may have several links, each with a ``peer_id``
    number: int  # grows with every message of the same gateway
    used: dict[str, tuple[int, int]]  # by key name: tokens of the last minute and day, reserved ones too
    age_s: float = 0.0  # how long workers have kept it


# -- a request ----------------------------------------------------------------------------------------------------


class AskImages(_Message, frozen=True, kw_only=True):
    """What does a prompt have in the place of images of these sizes? For workers whose card says that they read images."""

    query: int  # comes back with the answer
    sizes: list[tuple[int, int]]  # (width, height) in pixels


class ImagesTold(_Message, frozen=True, kw_only=True):
    """The answer to ``AskImages``. With neither ``told`` nor ``problem``: the worker cannot tell now, another one might."""

    query: int
    told: ImageTexts | None = None
    problem: str = ""  # for the client: why there is no answer


class DecodeTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The decode worker that the gateway chose."""

    address: str  # of its control socket


class Submit(_OfAttempt, frozen=True, kw_only=True, omit_defaults=True):
    """Compute a request: prefill it and hand it over to ``decode``, or do all of it here if that is None (local prefill).

    ``token_ids`` holds the prompt, then the output of earlier attempts. The worker continues there, with the same sampling noise as
    if there had been only one attempt.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    decode: DecodeTarget | None = None
    timeout_s: float | None = None  # time left; after it the client no longer waits
    retention: Retention | None = None  # how long its blocks should stay cached
    cache_salt: str = ""  # only requests with the same salt share cached blocks
    adapter: AdapterRef | None = None  # LoRA adapter; None: the base model
    flow: Flow = Flow()
    max_uncached_tokens: int | None = None  # for local prefill: refuse with ``NOT_CACHED`` if more must be computed
    trace_id: str = ""  # shown in log lines; if not empty, the request is traced, and ``Timings`` has its chunks
    images: list[PromptImage] = []  # of the prompt, in order


class Withdraw(_OfAttempt, frozen=True, kw_only=True):
    """Return the attempt as ``Withdrawn`` if its prompt has not begun. Otherwise it continues, and there is no answer."""


class Cancel(_OfAttempt, frozen=True, kw_only=True):
    """End the attempt in any state. The worker answers ``Cancelled``, even if it does not know the attempt."""


class PromptChunk(msgspec.Struct, frozen=True, array_like=True):
    """The part of a prompt that one step computed."""

    begun_s: float  # since the start of the first chunk
    duration_s: float
    num_tokens: int


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parts of the time to first token and of the hand-off. Each is measured on one worker's monotonic clock."""

    queue_s: float | None = None  # from arrival to the start of the first chunk
    prefill_s: float | None = None  # from the start of the first chunk to the first token
    transfer_s: float | None = None  # from the commit's arrival to the last block's verification
    first_step_s: float | None = None  # from verification to the first decode step's token
    chunks: list[PromptChunk] = []  # the first chunks within ``prefill_s``, if the request is traced


class Beam(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence that a beam search found."""

    tokens: list[SampledToken]  # of the output
    finish_reason: FinishReason
    score: float  # log probability / length ** length_penalty


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one attempt. ``index`` is the output position of the first one, counted from 0 over all attempts.

    A decode worker repeats the first token that the prefill worker already sent. So its stream is complete in itself, and the
    gateway drops tokens that it has.
    """

    request_id: str
    attempt: int
    index: int
    tokens: list[SampledToken]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None  # cached prompt tokens, sent with an attempt's first tokens
    timings: Timings | None = None
    prompt_logprobs: list[SampledToken] | None = None  # for every prompt token but the first; sent with the first token
    beams: list[Beam] | None = None  # result of a beam search, sent with the finish reason; no tokens come before it

    @property
    def num_tokens(self) -> int:
        """The number of new tokens, those of all beams included."""
        return len(self.tokens) if self.beams is None else sum(len(beam.tokens) for beam in self.beams)


class Tokens(_Message, frozen=True, kw_only=True):
    """All new tokens of one step for one gateway."""

    items: list[TokenDelta]


class HandedOver(_OfAttempt, frozen=True, kw_only=True):
    """The decode worker has verified the KV and owns the request. The prefill worker's part is over."""


class Preempted(_OfAttempt, frozen=True, kw_only=True):
    """A decode worker took the attempt's blocks for others. The attempt continues when there is room, unless it is cancelled."""


class Withdrawn(_OfAttempt, frozen=True, kw_only=True):
    """The attempt ended before its prompt began, as the gateway asked. No other worker has heard of it."""


class Failed(_OfAttempt, frozen=True, kw_only=True):
    """The attempt is over and holds nothing any more."""

    code: FailureCode
    detail: str
    retry_after_s: float | None = None
    about: str | None = None  # what is at fault, if known: ABOUT_GUIDE, ABOUT_IMAGES, perhaps others later


class Cancelled(_OfAttempt, frozen=True, kw_only=True):
    """The attempt is over because it was cancelled, and its blocks are released."""


# -- the hand-off -------------------------------------------------------------------------------------------------


class Offer(_OfAttempt, frozen=True, kw_only=True, omit_defaults=True):
    """A prefill worker started a request and asks for room for its KV. The decode worker checks the hashes against the tokens."""

    gateway_id: str  # ``peer_id`` of the gateway that receives the tokens
    fingerprint: bytes
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_hashes: list[bytes]  # for all blocks; the last block may be partial
    timeout_s: float | None = None  # as in Submit
    retention: Retention | None = None  # as in Submit
    cache_salt: str = ""  # as in Submit
    trace_id: str = ""  # as in Submit
    adapter: AdapterRef | None = None  # as in Submit
    flow: Flow = Flow()
    images: list[ImageSpan] = []  # as in Submit; decode workers need no pixels


class Grant(_OfAttempt, frozen=True, kw_only=True):
    """Blocks are reserved until ``ttl_s`` after the lease's last message or block."""

    lease_id: int
    epoch: int
    num_cached_blocks: int  # leading blocks that need not be sent
    ttl_s: float
    seal_key: bytes | None = None  # AES-256 key for this lease's blocks; None: blocks are sent plain


class Refuse(_OfAttempt, frozen=True, kw_only=True):
    """The offer gets no lease; nothing is reserved."""

    code: FailureCode
    detail: str
    retry_after_s: float | None = None


class Commit(_OfLease, frozen=True, kw_only=True):
    """The prefill worker has sent all blocks; some may still be on their way. ``chain_hash`` is the last block's hash."""

    chain_hash: bytes
    first_token: SampledToken
    num_cached_tokens: int  # prompt tokens that the prefill worker had cached
    position_offset: int = 0  # added to the positions of the tokens behind the prompt in rotary embeddings


class Verified(_OfLease, frozen=True, kw_only=True):
    """Every block passed verification. The decode worker owns the sequence, and the sender may reuse its blocks."""


class Reject(_OfLease, frozen=True, kw_only=True):
    """The lease is over and its blocks are released. Nothing was sampled from them."""

    code: FailureCode
    detail: str


class Renew(_OfLease, frozen=True, kw_only=True):
    """The prefill worker still computes. The lease's time starts again."""


class Abort(_OfLease, frozen=True, kw_only=True):
    """The prefill worker ends the lease and sends no more blocks for it."""

    reason: str


Message = (
    Hello | Welcome | HelloRefused | Ping | Bye | Status | KeyTokens | Distrust | AskImages | ImagesTold
    | Submit | Withdraw | Cancel | Tokens | HandedOver | Preempted | Withdrawn | Failed | Cancelled
    | Offer | Grant | Refuse | Commit | Verified | Reject | Renew | Abort
)  # fmt: skip
