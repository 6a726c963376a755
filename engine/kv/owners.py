"""The owners of blocks: sequences, leases of a hand-off, and returns from the tier below the pool."""

from __future__ import annotations

import enum
from typing import NamedTuple


class OwnerKind(enum.StrEnum):
    """The kinds of owners."""

    SEQUENCE = "sequence"
    LEASE = "lease"
    RETURN = "return"


class Owner(NamedTuple):
    """An owner of blocks; ``key`` is unique within its kind while it holds any. A tuple, because it is hashed often."""

    kind: OwnerKind
    key: str


def sequence_owner(key: tuple[str, int], beam: int = 0) -> Owner:
    """The owner of a sequence's blocks, by its (request_id, attempt) and its number among the beams of one search."""
    return Owner(OwnerKind.SEQUENCE, f"{key[0]}/{key[1]}#{beam}" if beam else f"{key[0]}/{key[1]}")
