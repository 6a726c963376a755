"""Frames for the control messages' decoder alone."""

from __future__ import annotations

import functools
import random

from kvrelay.wire.codec import Codec
from kvrelay.wire.errors import MalformedMessageError
from kvrelay.wire.messages import Message

from .absurd import AbsurdMessages
from .findings import Findings
from .mutator import Mutator


def fuzz_decoder(rng: random.Random, num_frames: int) -> int:
    """Frames for the decoder alone: a message, or MalformedMessageError. What it decodes must survive another round."""
    absurd, mutator, codec, findings = AbsurdMessages(rng), Mutator(rng), Codec(), Findings()
    corpus = [absurd.frame({}) for _ in range(300)]

    def decode(frame: bytes) -> None:
        try:
            message = codec.decode(frame)
        except MalformedMessageError:
            return
        if rng.random() < 0.1:
            once: Message = codec.decode(codec.encode(message))
            assert codec.encode(once) == codec.encode(message), f"not the same after a round: {message}"

    for _ in range(num_frames):
        frame = mutator.mutate(corpus) if rng.random() < 0.9 else rng.randbytes(rng.randrange(40))
        findings.of(functools.partial(decode, frame), functools.partial(shown, frame))
    findings.check()
    return num_frames


def shown(frame: bytes) -> str:
    """A frame, as a report names it."""
    try:
        return str(Codec().decode(frame))
    except MalformedMessageError:
        return frame.hex()
