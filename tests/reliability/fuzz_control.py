"""Fuzzes the control sockets of a decode and a prefill worker with frames from welcomed peers and strangers.

A batch begins an honest hand-off. Other peers then send well-formed messages with absurd values, and broken frames, while the
worker runs. At the end the honest hand-off must have the right bytes and tokens. Then the other peers leave, and the worker may
hold nothing of them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from kvrelay.common.images import image_digest
from kvrelay.common.sampling import SampledToken
from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.kv.owners import sequence_owner
from kvrelay.wire.codec import Codec
from kvrelay.wire.errors import MalformedMessageError
from kvrelay.wire.leases.lease import VerifiedLease
from kvrelay.wire.messages import (
    Commit,
    DecodeTarget,
    Grant,
    HandedOver,
    Hello,
    Offer,
    Renew,
    Role,
    Submit,
    Tokens,
    Verified,
)
from kvrelay.wire.transfers.transfer import absurdity

from ..images import png, with_images
from .absurd import AbsurdMessages
from .control_rigs import CARD, EPOCH, FINGERPRINT, VOCAB, DecodeRig, PrefillRig, kv_blocks, offer_of
from .findings import Findings
from .mutator import Mutator

NUM_OUTPUT = 6
_TURN_EVERY = 40  # frames
_CORPUS = 300
_MAX_TURNS = 400  # at most, until all requests have ended
HONEST_GATEWAY, HONEST_PREFILL = "honest-gateway", "honest-prefill"
_PICTURE = png(128, 128)
_ANSWERS = ("Grant", "Refuse", "Verified", "Reject")


class _Fuzz:
    """The common parts of both workers' fuzzing."""

    def __init__(self, rig: Any, rng: random.Random, peers: dict[str, Role]) -> None:
        self.rig = rig
        self.rng = rng
        self.peers = peers
        self.findings = Findings()
        self.absurd = AbsurdMessages(rng)
        self.mutator = Mutator(rng)
        self.codec = Codec()
        self.number = 0
        self.corpus: list[bytes] = [self.codec.encode(hello) for hello in self.hellos()]

    def hellos(self) -> list[Hello]:
        return [Hello(role=role, peer_id=name, layout=CARD.layout) for name, role in self.peers.items()]

    def prompt(self) -> list[int]:
        """A new prompt, unlike those of earlier batches."""
        self.number += 1
        return [self.number % VOCAB, self.number // VOCAB, *(self.rng.randrange(VOCAB) for _ in range(15))]

    def known(self, lease_ids: Sequence[int], offers: Sequence[Offer]) -> dict[str, Sequence[Any]]:
        """Values that pass a worker's first checks, by field."""
        sampling, span = {"max_tokens": 5, "temperature": 0.0}, [2, 5, image_digest(_PICTURE)]
        return {
            "request_id": ["f1", "f2", "f3", *(offer.request_id for offer in offers)],
            "attempt": [1, 2],
            "lease_id": [*lease_ids, 1],
            "epoch": [EPOCH, EPOCH, EPOCH, EPOCH + 1],
            "fingerprint": [FINGERPRINT],
            "layout": [msgspec.to_builtins(CARD.layout)],
            "token_ids": [offer.token_ids for offer in offers],
            "block_hashes": [offer.block_hashes for offer in offers],
            "num_prompt_tokens": [1, 4, 17],
            "chain_hash": [offer.block_hashes[-1] for offer in offers],
            "sampling": [sampling],
            "first_token": [[5, None, []]],
            "peer_id": list(self.peers),
            "gateway_id": [*self.peers, HONEST_GATEWAY],
            "decode": [{"address": PrefillRig.fuzz_address}, {"address": "nonsense"}],
            "seal_key": [None],
            "num_cached_blocks": [0, 1],
            "images": [[], [[span, _PICTURE]], [span]],  # of Submit, and of Offer
            "position_offset": [0, 0, -3],
        }

    def frames(self, num_frames: int, known: dict[str, Sequence[Any]]) -> None:
        """Send frames from all peers that are not honest, and from strangers."""
        names = [name.encode() for name in self.peers]
        for number in range(num_frames):
            chance = self.rng.random()
            sender = self.rng.choice(names) if chance < 0.97 else self.rng.randbytes(self.rng.randrange(1, 9))
            if chance < 0.65:
                frame = self.absurd.frame(known)
                if self.rng.random() < 0.02:
                    self._keep(frame)
            else:
                frame = self.mutator.mutate(self.corpus)
            self._hear(sender, frame)
            if number % _TURN_EVERY == 0:
                self.findings.of(lambda: self.rig.turn(2), lambda: "a turn of the model thread")
                self.between(known)
                self.findings.of(self.rig.check, lambda: "the books")

    def between(self, known: dict[str, Sequence[Any]]) -> None:
        """Called between frames, for other events."""

    def greet(self) -> None:
        """All peers say Hello."""
        for hello in self.hellos():
            self.rig.say(hello.peer_id, hello)

    def leave(self) -> None:
        """All peers that are not honest leave. Checks that the worker holds nothing more."""
        for routing_id in list(self.rig.server._peers):
            if not routing_id.startswith(b"honest"):
                self.findings.of(functools.partial(self.rig.server._drop, routing_id), lambda: "a peer leaves")
        for _ in range(_MAX_TURNS):
            if not (self.rig.service.entries or self.rig.model.has_work()):
                break
            self.rig.turn(1)
            self.settle()
        left = self.rig.service.debug()
        assert not left, f"left behind: {left}"
        self.rig.check()
        ledger = self.rig.blocks.ledger()
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks, ledger
        self.rig.server.sent.clear()

    def settle(self) -> None:
        """Let a second pass."""
        self.rig.now_s += 1.0

    def answer_to(self, peer_id: str, kind: type[Any], request_id: str) -> Any:
        """The last message of this kind to an honest peer about this request."""
        said = [message for name, message in self.rig.server.sent if name == peer_id and isinstance(message, kind)]
        return next(message for message in reversed(said) if message.request_id == request_id)

    def _keep(self, frame: bytes) -> None:
        """Keep a frame for the mutator. The first few frames of a batch stay."""
        if len(self.corpus) < _CORPUS:
            self.corpus.append(frame)
        else:
            self.corpus[self.rng.randrange(4, _CORPUS)] = frame

    def _hear(self, sender: bytes, frame: bytes) -> None:
        self.findings.of(lambda: self.rig.hear(sender, frame), lambda: f"{sender!r} said {_shown(frame)}")


class DecodeFuzz(_Fuzz):
    """A decode worker, with an honest gateway and prefill worker among the others."""

    def __init__(self, rng: random.Random) -> None:
        peers = {"fuzz-gateway": Role.GATEWAY, "fuzz-prefill-1": Role.PREFILL, "fuzz-prefill-2": Role.PREFILL}
        super().__init__(DecodeRig(), rng, peers)
        self.rig.leases._handler = self
        self.num_verified = 0
        for name, role in ((HONEST_GATEWAY, Role.GATEWAY), (HONEST_PREFILL, Role.PREFILL)):
            self.rig.say(name, Hello(role=role, peer_id=name, layout=CARD.layout))

    def on_lease_verified(self, lease: VerifiedLease) -> None:
        """See LeaseHandler. Checks that the lease's blocks hold what an honest worker computes for its tokens."""
        for block_id, block in zip(lease.block_tables[0], kv_blocks(list(lease.offer.token_ids)), strict=False):
            assert bytes(self.rig.engine.store.block(block_id)) == block, f"lease {lease.lease_id}: other bytes"
        self.num_verified += 1
        self.rig.service.on_lease_verified(lease)

    def on_lease_rejected(self, *told: Any) -> None:
        """See LeaseHandler."""
        self.rig.service.on_lease_rejected(*told)

    def batch(self, num_frames: int = 400) -> int:
        """See the module. Returns how many frames it was."""
        self.greet()
        prompt = self.prompt()
        honest = offer_of(f"honest-{self.number}", prompt, HONEST_GATEWAY, NUM_OUTPUT)
        self.rig.say(HONEST_PREFILL, honest)
        grant: Grant = self.answer_to(HONEST_PREFILL, Grant, honest.request_id)
        blocks = kv_blocks(prompt)
        for index in range(2):
            self.rig.land(grant.lease_id, honest, index, blocks[index])
        others = [offer_of(name, self.prompt(), "fuzz-gateway", NUM_OUTPUT) for name in ("f1", "f2")]
        for offer in others:
            self.rig.say("fuzz-prefill-1", offer)
        lease_ids = [entry["lease_id"] for entry in self.rig.leases.snapshot()]
        self.corpus[:3] = [self.codec.encode(message) for message in (_commit_of(grant, honest, 5), *others)]
        self.frames(num_frames, self.known([*lease_ids, lease_ids[-1] + 1], [honest, *others]))
        self.rig.say(HONEST_PREFILL, Renew(lease_id=grant.lease_id, epoch=EPOCH))
        for index in range(2, len(blocks)):
            self.rig.land(grant.lease_id, honest, index, blocks[index])
        expected = expected_output(prompt, NUM_OUTPUT, VOCAB)
        num_verified = self.num_verified
        self.rig.say(HONEST_PREFILL, _commit_of(grant, honest, expected[0]))
        assert self.num_verified == num_verified + 1, "the honest hand-off was not verified"
        held = self.rig.blocks.owned_blocks(sequence_owner((honest.request_id, 1)))
        assert [bytes(self.rig.engine.store.block(block_id)) for block_id in held[: len(blocks)]] == blocks
        output: list[int] = []
        for _ in range(_MAX_TURNS):
            self.rig.turn(1)
            output = self._output_of(honest.request_id)
            if len(output) == NUM_OUTPUT:
                break
        assert output == expected, f"{honest.request_id}: {output} instead of {expected}"
        self.leave()
        return num_frames

    def settle(self) -> None:
        self.rig.now_s += 1.0
        self.rig.leases.reap()

    def _output_of(self, request_id: str) -> list[int]:
        deltas = [
            item
            for peer_id, message in self.rig.server.sent
            if peer_id == HONEST_GATEWAY and isinstance(message, Tokens)
            for item in message.items
            if item.request_id == request_id
        ]
        return [token.token_id for delta in deltas for token in delta.tokens]


class PrefillFuzz(_Fuzz):
    """A prefill worker, with an honest gateway and an honest decode worker among the others."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(PrefillRig(), rng, {"fuzz-gateway": Role.GATEWAY, "fuzz-gateway-2": Role.GATEWAY})
        self.rig.say(HONEST_GATEWAY, Hello(role=Role.GATEWAY, peer_id=HONEST_GATEWAY))
        self.num_leases = 0

    def batch(self, num_frames: int = 400) -> int:
        """See the module. Returns how many frames it was."""
        self.greet()
        prompt = self.prompt()
        offer = offer_of(f"honest-{self.number}", prompt, HONEST_GATEWAY, NUM_OUTPUT)
        submit = Submit(
            request_id=offer.request_id,
            attempt=1,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=offer.sampling,
            decode=DecodeTarget(address=PrefillRig.honest_address),
        )
        self.rig.say(HONEST_GATEWAY, submit)
        self.rig.turn(1)
        said, shipped = self.rig.honest_link.said, self.rig.honest_link.shipped
        assert offer in said, "the honest request was not offered"
        others = [offer_of(name, self.prompt(), "fuzz-gateway", NUM_OUTPUT) for name in ("f1", "f2")]
        decode = DecodeTarget(address=PrefillRig.fuzz_address)
        token_ids, images = with_images([self.number % VOCAB, self.number // VOCAB], _PICTURE, [5, 6])
        self.corpus[:3] = [
            self.codec.encode(msgspec.structs.replace(submit, request_id="f1", decode=decode)),
            self.codec.encode(msgspec.structs.replace(submit, request_id="f2", token_ids=others[1].token_ids)),
            self.codec.encode(
                msgspec.structs.replace(
                    submit,
                    request_id="f3",
                    token_ids=token_ids,
                    num_prompt_tokens=len(token_ids),
                    decode=decode,
                    images=images,
                )
            ),
        ]
        self.rig.hear(b"fuzz-gateway", self.corpus[0])
        self.rig.hear(b"fuzz-gateway-2", self.corpus[1])
        self.rig.hear(b"fuzz-gateway", self.corpus[2])
        self.rig.turn(1)
        self.frames(num_frames, self.known([1, 2, 3], [offer, *others]))
        self.num_leases += 1
        lease: dict[str, int] = {"lease_id": 10**6 + self.num_leases, "epoch": EPOCH}
        grant = Grant(request_id=offer.request_id, attempt=1, num_cached_blocks=0, ttl_s=30.0, **lease)
        self.rig.service.on_link_message(self.rig.honest_link.link, grant)
        self.rig.turn(8)
        mine = [(header.block_index, payload) for header, payload in shipped if header.lease_id == lease["lease_id"]]
        assert [index for index, _ in mine] == list(range(len(offer.block_hashes))), "not every block once, in order"
        shipped_kv, kv_nbytes = (
            b"".join(payload for _, payload in mine),
            len(prompt) * CARD.layout.geometry.token_nbytes,
        )
        # After the last token a block holds old bytes.
        assert shipped_kv[:kv_nbytes] == b"".join(kv_blocks(prompt))[:kv_nbytes], "other bytes were shipped"
        (commit,) = [
            message for message in said if isinstance(message, Commit) and message.lease_id == lease["lease_id"]
        ]
        assert commit.first_token.token_id == expected_output(prompt, 1, VOCAB)[0]
        self.rig.service.on_link_message(self.rig.honest_link.link, Verified(**lease))
        self.settle()
        assert self.answer_to(HONEST_GATEWAY, HandedOver, offer.request_id)
        self.leave()
        for link in (self.rig.honest_link, self.rig.fuzz_link):
            link.said.clear()
            link.shipped.clear()
        return num_frames

    def between(self, known: dict[str, Sequence[Any]]) -> None:
        """The fuzzed decode worker sends absurd answers, and the transfers' time-outs are checked."""
        for _ in range(8):
            message = self.codec.decode(self.absurd.frame(known, _ANSWERS))
            if absurdity(message) is not None:  # such a message would end the link
                continue
            answer = functools.partial(self.rig.service.on_link_message, self.rig.fuzz_link.link, message)
            self.findings.of(answer, functools.partial("a decode worker said {}".format, message))
        self.findings.of(self.rig.service.tick, lambda: "a tick")

    def settle(self) -> None:
        self.rig.now_s += 1.0
        self.rig.service.tick()


def _commit_of(grant: Grant, offer: Offer, first_token: int) -> Commit:
    return Commit(
        lease_id=grant.lease_id,
        epoch=grant.epoch,
        chain_hash=offer.block_hashes[-1],
        first_token=SampledToken(first_token),
        num_cached_tokens=0,
    )


def _shown(frame: bytes) -> str:
    """A frame as a report shows it."""
    try:
        return str(Codec().decode(frame))
    except MalformedMessageError:
        return frame.hex()
