"""Whom a decode worker talks to. A pure function of what the peer says and what this worker is."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.wire.blocks.seal import seal_mismatch
from kvrelay.wire.messages import PROTOCOL_MAX, FailureCode, Hello, HelloRefused, Role, Welcome
from kvrelay.worker.submit import WorkerIdentity


@dataclass(frozen=True, slots=True)
class DataPorts:
    """Where this worker takes KV blocks."""

    address: str  # of the data socket
    token: str | None = None  # what both let connections in by; None: all
    shared_memory: str | None = None  # name of the socket for senders on this host; None: they use the data socket, too


def welcome(hello: Hello, identity: WorkerIdentity, data: DataPorts, *, seals_kv: bool) -> Welcome | HelloRefused:
    """Gateways, and prefill workers whose KV fits; only the latter learn the token, and where shared memory is taken."""
    mine = identity.card.layout
    if hello.role is Role.PREFILL:
        if hello.layout is None or hello.layout.fingerprint() != mine.fingerprint():
            differences = ["no layout given"] if hello.layout is None else mine.differences(hello.layout)
            detail = f"KV layouts differ (decode / prefill): {'; '.join(differences)}"
            return HelloRefused(code=FailureCode.LAYOUT_MISMATCH, detail=detail)
        if hello.seals_kv is not seals_kv:
            detail = seal_mismatch(decode_seals=seals_kv, prefill_seals=hello.seals_kv)
            return HelloRefused(code=FailureCode.LAYOUT_MISMATCH, detail=detail)
    elif hello.role is not Role.GATEWAY:
        detail = f"a decode worker talks to gateways and prefill workers, not {hello.role}"
        return HelloRefused(code=FailureCode.INVALID, detail=detail)
    return Welcome(
        role=Role.DECODE,
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        protocol=min(hello.protocol_max, PROTOCOL_MAX),
        card=identity.card,
        data_address=data.address,
        data_token=data.token if hello.role is Role.PREFILL else None,
        shared_memory=data.shared_memory if hello.role is Role.PREFILL else None,
    )
