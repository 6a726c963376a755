"""What a worker tells the others about the model it serves, and the fingerprint that says whose KV fits whose.

Two workers may exchange KV blocks exactly if their fingerprints are equal. The fingerprint covers what the bytes of
a block depend on, and nothing else: not the software's version (rolling upgrades work), not the pool's size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from kvrelay.common.kv_geometry import KvGeometry

TEXT_ONLY = "the model reads text only"
NATIVE_TEXT_ONLY = "with --backend native the model reads text only; with auto it reads images, too"
IMAGES_OFF = "decode workers read images only with --images"

# Of fields whose name does not say what to do.
_WAYS_OUT = {
    "kv_scales": " (other K/V scales, '' if they are 1: all workers need the same checkpoint and the same kv_scales.safetensors)"
}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything the bytes of a KV block depend on besides its tokens.

    A field with a default is left out where it has it, so that fingerprints stay what they were before there was that field.
    """

    model_id: str  # what the operator called the model
    weights_digest: str  # hex digest over the checkpoint's config and tensor files
    geometry: KvGeometry
    rope: str  # canonical JSON of the rope settings
    kv_scales: str = ""  # hex digest of an fp8 pool's scales; "": all are 1, or there are none

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.geometry.block_size

    def fingerprint(self) -> bytes:
        """16 bytes, equal exactly for equal layouts."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16, person=b"kvrelay-layout").digest()

    def differences(self, other: KvLayout) -> list[str]:
        """The facts in which two layouts differ, as ``name: mine / theirs``; empty if the fingerprints are equal."""
        mine, theirs = self._facts(), other._facts()
        return [
            f"{name}: {mine.get(name)!r} / {theirs.get(name)!r}{_WAYS_OUT.get(name, '')}"
            for name in mine | theirs
            if mine.get(name) != theirs.get(name)
        ]

    def _facts(self) -> dict[str, object]:
        facts = msgspec.structs.asdict(self)
        geometry: KvGeometry = facts.pop("geometry")
        facts["block_size"] = geometry.block_size
        for number, group in enumerate(geometry.groups):
            facts |= {f"group {number} {name}": value for name, value in msgspec.to_builtins(group).items()}
        return facts


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's model and its limits, as announced in ``Welcome``."""

    layout: KvLayout
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together: min(model's own, --max-model-len, what the pool holds)
    num_blocks: int  # blocks in this worker's pool
    device_type: str = "cpu"  # in torch's words
    processors: tuple[str, ...] = ()  # names of the operator's logits processors that requests may ask for
    no_images: str = TEXT_ONLY  # why prompts may have no images here; "": they may

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.layout.geometry.block_nbytes


class SharedLimits(msgspec.Struct, frozen=True):
    """What every one of several workers can do."""

    max_model_len: int
    vocab_size: int
    processors: frozenset[str]

    @classmethod
    def of(cls, cards: Sequence[ModelCard]) -> SharedLimits:
        """Of at least one card."""
        return cls(
            max_model_len=min(card.max_model_len for card in cards),
            vocab_size=min(card.vocab_size for card in cards),
            processors=frozenset.intersection(*(frozenset(card.processors) for card in cards)),
        )
