"""What the fake engine says: made-up tokens, each a function of all tokens before it. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

import xxhash

from kvrelay.common.adapter_files import AdapterRef
from kvrelay.common.images import ImageSpan
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.fake.adapters import adapter_root
from kvrelay.engine.fake.step import FakeSequence
from kvrelay.engine.step.plan import Rules

_SEED_MASK = 2**64 - 1  # as in the sampler
_MAX_LOOKS = 100  # attempts to find an allowed token
_PLAIN_TOKENS = range(1000, 20_000)


def token_digests(token_ids: Seq[int], parent: bytes = b"", images: Mapping[int, bytes] | None = None) -> list[bytes]:
    """A digest for each token, over it and all tokens before it. ``parent``: the digest of the tokens before ``token_ids``.

    ``images``: the digests of images, by the index of their first token; they count from there on.
    """
    digests: list[bytes] = []
    for index, token_id in enumerate(token_ids):
        if images and index in images:
            parent = xxhash.xxh3_64_digest(parent + images[index])
        parent = xxhash.xxh3_64_digest(parent + token_id.to_bytes(4, "little"))
        digests.append(parent)
    return digests


def digests_by_start(spans: Iterable[ImageSpan], start: int = 0) -> dict[int, bytes]:
    """The digests of images as ``token_digests`` takes them for tokens from position ``start`` on."""
    return {span.start - start: span.digest for span in spans if span.start >= start}


def next_token(sequence: FakeSequence, digest: bytes, vocab_size: int) -> int:
    """The token after ``digest``, the same on every worker. Unless sampling is greedy it depends on seed and choice.

    Before ``min_tokens`` it avoids stop tokens, if some further draws find another token.
    """
    sampling = sequence.sampling
    salt = b"" if sampling.temperature == 0 else (sampling.seed & _SEED_MASK).to_bytes(8, "little")
    if salt and sampling.choice:
        salt += sampling.choice.to_bytes(8, "little")
    token_id = _token_of(digest + salt, vocab_size)
    if sequence.num_output_tokens < sampling.min_tokens:
        for look in range(_MAX_LOOKS):
            if token_id not in sampling.stop_token_ids:
                break
            token_id = _token_of(digest + salt + bytes([look]), vocab_size)
    return token_id


def masks_of(rules: Rules | None) -> dict[int, bytes]:
    """The masks of guided rows, numbered as in Rules."""
    if rules is None or not rules.guided_rows:
        return {}
    size = len(rules.bitmask) // len(rules.guided_rows)
    return {row: rules.bitmask[place * size : place * size + size] for place, row in enumerate(rules.guided_rows)}


def guided(mask: bytes, token_id: int, vocab_size: int) -> int:
    """The token, or the next one in the vocabulary that the guide allows. The token itself if the guide allows none."""
    import numpy as np  # noqa: PLC0415 - only guides need it

    allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:vocab_size])
    return int(allowed[np.searchsorted(allowed, token_id) % len(allowed)]) if len(allowed) else token_id


def with_logprobs(token_id: int, digest: bytes, num_top: int, vocab_size: int) -> SampledToken:
    """``token_id`` after ``digest`` with made-up log probabilities, the same on every worker.

    The likeliest token is the greedy one, and each next one is half as likely. Tokens outside the list are less likely than all in
    it.
    """
    looks = dict.fromkeys(_token_of(digest + bytes(look), vocab_size) for look in range(2 * num_top))
    top = tuple((other, -math.log(2) * (rank + 1)) for rank, other in enumerate(list(looks)[:num_top]))
    return SampledToken(token_id, dict(top).get(token_id, -math.log(2) * (len(top) + 1)), top)


def candidates(sampling: SamplingParams, digest: bytes, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens after ``digest``, for a beam search: as many as it asks for, with made-up probabilities.

    At one of eight positions a stop token is among them, so that beams end at different lengths.
    """
    draws = random.Random(digest)  # noqa: S311 - the same ones on every worker are wanted
    count = min(sampling.num_top_logprobs or 0, vocab_size)
    plain = _PLAIN_TOKENS if vocab_size >= _PLAIN_TOKENS.stop else range(vocab_size)
    token_ids = draws.sample(plain, count)
    if sampling.stop_token_ids and draws.randrange(8) == 0:
        stop = draws.choice(sampling.stop_token_ids)
        token_ids = [stop, *(token_id for token_id in token_ids if token_id != stop)][:count]
    log_probs = sorted((math.log(1.0 - draws.random()) - 0.1 for _ in token_ids), reverse=True)
    return tuple(zip(token_ids, log_probs, strict=True))


def expected_output(
    token_ids: Seq[int],
    num_tokens: int,
    vocab_size: int,
    adapter: AdapterRef | None = None,
    images: Iterable[ImageSpan] = (),
) -> list[int]:
    """The output of a greedy fake engine after ``token_ids``."""
    root, by_start = b"" if adapter is None else adapter_root(adapter.digest), digests_by_start(images)
    digest = token_digests(token_ids, root, by_start)[-1]
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(_token_of(digest, vocab_size))
        digest = token_digests(output[-1:], digest)[-1]
    return output


def _token_of(digest: bytes, vocab_size: int) -> int:
    """A token for ``digest``. In a large vocabulary it avoids the first ids (special tokens) and the last ones (rare pieces)."""
    plain = _PLAIN_TOKENS if vocab_size >= _PLAIN_TOKENS.stop else range(vocab_size)
    return plain[xxhash.xxh3_64_intdigest(digest) % len(plain)]
