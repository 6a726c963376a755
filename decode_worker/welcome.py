"""Which prefill workers a decode worker takes KV blocks of, and where. A pure function of what both are."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.model_card import KvLayout
from kvrelay.wire.blocks.seal import seal_mismatch
from kvrelay.wire.messages import FailureCode, Hello, HelloRefused


@dataclass(frozen=True, slots=True)
class DataPorts:
    """Where this worker takes KV blocks."""

    address: str  # of the data socket
    token: str | None = None  # what both let connections in by; None: all
    shared_memory: str | None = None  # name of the socket for senders on this host; None: they use the data socket, too


def misfit(hello: Hello, mine: KvLayout, *, seals_kv: bool) -> HelloRefused | None:
    """Why this worker can read no KV block of the prefill worker that says ``hello``; None if it can."""
    if hello.layout is None or hello.layout.fingerprint() != mine.fingerprint():
        differences = ["no layout given"] if hello.layout is None else mine.differences(hello.layout)
        detail = f"KV layouts differ (decode / prefill): {'; '.join(differences)}"
    elif hello.seals_kv is not seals_kv:
        detail = seal_mismatch(decode_seals=seals_kv, prefill_seals=hello.seals_kv)
    else:
        return None
    return HelloRefused(code=FailureCode.LAYOUT_MISMATCH, detail=detail)
