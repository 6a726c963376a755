"""Bytes for an HTTP port that no honest client sends: noise, partial requests, absurd headers, other protocols, pipelines."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
from collections.abc import Callable

PATIENCE_S = 10.0
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_BODY = json.dumps({"prompt": [5, 6, 7], "max_tokens": 3}).encode()


def request(body: bytes = _BODY, path: bytes = b"/v1/completions", more: bytes = b"", method: bytes = b"POST") -> bytes:
    """A valid request, unless the arguments change it."""
    head = b"%s %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n"
    return head % (method, path, more, len(body)) + body


def _nonsense(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 5000))


def _half(rng: random.Random) -> bytes:
    whole = request()
    return whole[: rng.randrange(1, len(whole))]


def _flipped(rng: random.Random) -> bytes:
    whole = bytearray(request())
    for _ in range(rng.randrange(1, 6)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    return bytes(whole)


def _absurd_header(rng: random.Random) -> bytes:
    value = rng.choice(
        (b"\x00", b"\xff" * 50, b"x" * 9000, b"9" * 400, b"-1", b"\t", b"a\rb", "ß𝄞".encode(), rng.randbytes(30))
    )
    name = rng.choice(
        (b"content-length", b"transfer-encoding", b"content-type", b"x-request-id", b"authorization", b"host", b"expect",
         b"connection", b"upgrade", b"x" * 500, b"x-kvrelay-timings", b"\xff", b"accept-encoding", b"traceparent")
    )  # fmt: skip
    return request(more=name + b": " + value + b"\r\n")


def _other_length(rng: random.Random) -> bytes:
    length = rng.choice((b"0", b"1", b"10", b"100000000", b"18446744073709551616", b"0x10", b"1e3", b"+5", b"5, 5"))
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: " + length + b"\r\n\r\n" + _BODY


def _chunked(rng: random.Random) -> bytes:
    size = rng.choice((b"%x" % len(_BODY), b"ffffffffffffffff", b"-1", b"zz", b"1;a=" + b"x" * 3000, b"0"))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + size + b"\r\n" + _BODY + b"\r\n0\r\n\r\n"


def _many_headers(rng: random.Random) -> bytes:
    return request(more=b"".join(b"x-%d: y\r\n" % number for number in range(rng.randrange(100, 3000))))


def _long_path(rng: random.Random) -> bytes:
    return request(path=b"/v1/" + rng.choice((b"x" * 20_000, b"%ff%00", b"../" * 900, b"\xff\xfe", b"?" * 5000)))


def _http2(rng: random.Random) -> bytes:
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)) + rng.randbytes(200)


def _tls(rng: random.Random) -> bytes:
    return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(508)


def _pipelined(rng: random.Random) -> bytes:
    return request() * rng.randrange(2, 12) + _half(rng)


def _bad_json(rng: random.Random) -> bytes:
    body = rng.choice(
        (b"[" * 50_000, b'{"prompt":' * 5000, b"\xff\xfe", b'"\\ud800"', b'{"prompt": NaN}', b"", rng.randbytes(90))
    )
    return request(body)


def _method(rng: random.Random) -> bytes:
    method = rng.choice((b"GET", b"OPTIONS", b"TRACE", b"CONNECT", b"HEAD", b"PUT", b"BREW", b"post", b"M-SEARCH"))
    return request(method=method)


WAYS: tuple[Callable[[random.Random], bytes], ...] = (
    _nonsense, _half, _flipped, _absurd_header, _other_length, _chunked, _many_headers, _long_path, _http2, _tls, _pipelined,
    _bad_json, _method,
)  # fmt: skip


def send_garbage(port: int, rng: random.Random) -> str:
    """Send one kind of garbage, and read the answer to its end. Returns the kind.

    Raises AssertionError if the answer is not HTTP or a 500, or if the connection stays open.
    """
    way = rng.choice(WAYS)
    sent = way(rng)
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        try:
            connection.sendall(sent)
            if rng.random() < 0.8:
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(65536):
                    answer += part
        except TimeoutError:
            raise AssertionError(f"the connection stayed open after {sent[:300]!r}") from None
        except OSError:  # the server closed the connection
            with contextlib.suppress(OSError):
                connection.close()
    statuses = [int(status) for status in _STATUS.findall(answer)]
    assert not answer or answer.startswith(b"HTTP/1.1 "), f"not HTTP: {answer[:100]!r} to {sent[:300]!r}"
    assert 500 not in statuses, f"the server failed on {sent[:300]!r}: {answer[-500:]!r}"
    return way.__name__
