"""A client that reads nothing, in front of the whole relay: what it held is given back."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from kvrelay.gateway.settings import HttpLimits

from .gate import Gate
from .http_gateway import deployment, write_model

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def test_a_client_that_reads_nothing_loses_its_request_and_the_workers_get_their_blocks_back(model: Path) -> None:
    """Its stream stands still in the middle; the gate sees to it that the answer does not end by itself."""
    gate = Gate(num_tokens=300)
    limits = HttpLimits(client_timeout_s=0.5)
    async with deployment(model, gate=gate, http=limits, send_buffer_bytes=4096) as up:
        body = {
            "prompt": [5] * 40, "max_tokens": 400, "stream": True, "logprobs": 5, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        content = json.dumps(body).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(up.url.rpartition(":")[2])))
            client.sendall(head.encode() + content)
            async with asyncio.timeout(20):
                while await up.metric("kvrelay_client_disconnects_total") == 0:
                    await asyncio.sleep(0.01)  # polls for a state: the gateway has had enough
            gate.open()
            await up.settled()
        assert await up.metric("kvrelay_client_disconnects_total") == 1
        assert await up.metric("kvrelay_refused_connections_total") == 1
        neighbour = await up.client.post(TEXT, json={"prompt": [5] * 40, "max_tokens": 4})
        assert neighbour.status_code == 200
