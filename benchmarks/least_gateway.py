"""The least that a process between client and worker can do: for ``gateway.py``, which asks how far the gateway is from it.

    python benchmarks/least_gateway.py --port PORT --decode-workers ADDRESS

The same language, event loop, control link and messages as the gateway. A body's prompt and number of tokens go to the worker
unchecked; each token becomes a chunk of one event. No request is validated, routed, counted, limited, timed or repeated, no token
is decoded, and nobody is told of an error. What this adds to a token are sockets, their wake-ups, and the codecs.
"""

from __future__ import annotations

import asyncio
import itertools

import click
import msgspec
import uvloop
import zmq
from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import SamplingParams
from kvrelay.gateway.worker import first_tokens_first
from kvrelay.wire.control_client import ControlClient
from kvrelay.wire.messages import Hello, HelloRefused, Message, Role, Submit, TokenDelta, Tokens, Welcome
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.settings import LinkSettings

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_MODELS = b'{"object":"list","data":[{"id":"least"}]}'  # what a generator asks for
_READY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_MODELS), _MODELS)


class _Body(msgspec.Struct):
    prompt: list[int]
    max_tokens: int


class LeastGateway:
    """Who asked for what, and the link to the worker. Implements :class:`kvrelay.wire.control_client.ClientHandler`."""

    def __init__(self, address: str) -> None:
        self.is_up = asyncio.Event()
        self._clients: dict[str, asyncio.Transport] = {}  # by request
        self._numbers = itertools.count()
        self._body = msgspec.json.Decoder(_Body)
        self._event = msgspec.json.Encoder()
        hello = Hello(role=Role.GATEWAY, peer_id="least")
        metrics = WireMetrics(CollectorRegistry())
        self.link = ControlClient(address, hello, self, LinkSettings(), metrics=metrics, context=zmq.Context())

    def on_welcome(self, welcome: Welcome) -> None:
        """Begin."""
        self.is_up.set()

    def on_message(self, message: Message) -> None:
        """Pass tokens on."""
        items = first_tokens_first(message.items) if isinstance(message, Tokens) else []
        chunks = [(self._clients[item.request_id], self._chunk(item)) for item in items]
        for client, chunk in chunks:  # as the gateway does: behind all that is to be computed, in one go
            client.write(chunk)

    def on_lost(self, reason: str) -> None:
        """The end of the run."""

    def on_refused(self, refused: HelloRefused) -> None:
        """Never in a benchmark."""

    def ask(self, client: asyncio.Transport, body: bytes) -> None:
        """Send a request to the worker."""
        asked = self._body.decode(body)
        name = str(next(self._numbers))
        self._clients[name] = client
        sampling = SamplingParams(max_tokens=asked.max_tokens, temperature=0.0)
        self.link.send(Submit(
            request_id=name, attempt=1, token_ids=asked.prompt, num_prompt_tokens=len(asked.prompt), sampling=sampling
        ))  # fmt: skip

    def _chunk(self, item: TokenDelta) -> bytes:
        reason = item.finish_reason
        choice = {"index": 0, "text": str(item.tokens[0].token_id), "logprobs": None, "finish_reason": reason}
        event = {
            "id": item.request_id,
            "object": "text_completion",
            "created": 0,
            "model": "least",
            "choices": [choice],
        }
        data = b"data: " + self._event.encode(event) + (b"\n\n" if reason is None else b"\n\ndata: [DONE]\n\n")
        chunk = (b"" if item.index else _HEAD) + b"%x\r\n%b\r\n" % (len(data), data)
        return chunk if reason is None else chunk + b"0\r\n\r\n"


class _Connection(asyncio.Protocol):
    def __init__(self, gateway: LeastGateway) -> None:
        self._gateway = gateway
        self._came = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._came += data
        head, end, body = self._came.partition(b"\r\n\r\n")
        if not end:
            return
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        if head.startswith(b"GET"):
            self._transport.write(_READY)
        elif len(body) < int(length):
            return
        else:
            self._gateway.ask(self._transport, body)
        self._came = b""


async def _serve(port: int, address: str) -> None:
    gateway = LeastGateway(address)
    gateway.link.start()
    await gateway.is_up.wait()
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(gateway), "127.0.0.1", port)
    await server.serve_forever()


@click.command(help=__doc__)
@click.option("--port", required=True, type=int)
@click.option("--decode-workers", "address", required=True)
def main(port: int, address: str) -> None:
    """Run until it is killed."""
    uvloop.run(_serve(port, address))


if __name__ == "__main__":
    main()
