"""Links to decode workers: where data goes, and what becomes of workers that never come back."""

from __future__ import annotations

import asyncio

import pytest
import zmq
from prometheus_client import CollectorRegistry

from kvrelay.engine.fake import fake_card
from kvrelay.prefill_worker import links
from kvrelay.prefill_worker.links import DecodeLinks, LinkIdentity, data_address
from kvrelay.wire.messages import FailureCode, Message
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.settings import LinkSettings
from kvrelay.wire.transfers import DecodeLink


@pytest.mark.parametrize(
    ("control", "announced", "expected"),
    [
        ("tcp://10.0.0.7:7200", "tcp://0.0.0.0:7201", "tcp://10.0.0.7:7201"),
        ("tcp://[fd00::1]:7200", "tcp://[::]:7201", "tcp://[fd00::1]:7201"),
        ("tcp://10.0.0.7:7200", "tcp://10.9.9.9:7201", "tcp://10.9.9.9:7201"),
        ("tcp://decode-0.svc:7200", "ipc:///tmp/x", "ipc:///tmp/x"),
    ],
)
def test_blocks_go_where_the_worker_was_reached(control: str, announced: str, expected: str) -> None:
    assert data_address(control, announced) == expected


class Silent:
    """A handler that hears nothing of interest."""

    def on_link_up(self, address: str, link: DecodeLink) -> None:
        raise AssertionError("nobody is there")

    def on_link_down(self, address: str, link: DecodeLink | None, code: FailureCode, detail: str) -> None:
        raise AssertionError("it was never up")

    def on_link_message(self, link: DecodeLink, message: Message) -> None:
        raise AssertionError("nobody is there")


async def test_a_worker_that_is_gone_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    identity = LinkIdentity("p", fake_card().layout, LinkSettings(hello_timeout_s=0.05, ping_interval_s=0.05))
    made = DecodeLinks(identity, Silent(), WireMetrics(CollectorRegistry()), context)
    assert made.link_to("tcp://127.0.0.1:1") is None
    made.sweep()
    assert len(made._peers) == 1
    monkeypatch.setattr(links, "_FORGET_S", -1.0)
    made.sweep()
    assert not made._peers
    await made.stop()
    await asyncio.to_thread(context.term)  # returns only if every socket is closed
