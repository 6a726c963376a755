"""Runs in a pod: concurrent streams, each of which sends one chat completion after another until /tmp/stop exists.

python client.py URL STREAMS MAX_TOKENS [API_KEY]. It needs the standard library only.

Every finished request prints a JSON line: its stream, a digest of its text, its number of chunks, and its error. The
line also has the time to the first text and the longest silence after it. A stream repeats one request with one seed,
so all its answers must be equal.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import pathlib
import socket
import sys
import threading
import time
import urllib.parse

SILENCE_S = 15.0  # a server that is silent for this long counts as gone
CONNECT_S = 2.0  # a connection that is not made within this time is tried again, as clients do
CONNECT_TRIES = 10
HEADERS = {"Content-Type": "application/json"}
STOP = pathlib.Path("/tmp/stop")
# Sampled, because greedy nonsense repeats itself. Several ranks round sums differently, so no draw may lie at the edge
# of a token's share. top_k leaves out unlikely tokens, whose shares are as narrow as rounding. These seeds keep clear
# of other edges.
SAMPLING, FIRST_SEED = {"temperature": 1, "top_k": 20}, 8


def ask(url: urllib.parse.SplitResult, stream: int, max_tokens: int) -> dict[str, object]:
    """Send one request and describe its end. Never raises."""
    began_s = last_s = time.time()
    wait_s: float | None = None
    text, num_chunks, silence_s, finish, error = "", 0, 0.0, None, None
    content = f"Stream {stream}: " + "tell me of the relay race. " * (4 + 3 * stream)
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        **SAMPLING,
        "seed": FIRST_SEED + stream,
        "stream": True,
    }
    connection = http.client.HTTPConnection(url.hostname or "", url.port or 80)
    try:
        connection.sock = connected(url)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), HEADERS)
        response = connection.getresponse()
        if response.status != 200:
            error = f"http {response.status}: {response.read(300).decode(errors='replace')}"
        is_done = False
        while error is None and (line := response.readline()):
            if not line.startswith(b"data: "):
                continue
            now_s = time.time()
            if wait_s is not None:
                silence_s = max(silence_s, now_s - last_s)
            last_s = now_s
            if line.strip() == b"data: [DONE]":
                is_done = True
                break
            chunk = json.loads(line[6:])
            if "error" in chunk:
                error = f"event: {chunk['error']}"
                break
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
            if text and wait_s is None:
                wait_s = now_s - began_s
            num_chunks += 1
        if error is None and not (is_done and finish):
            error = "cut: the stream ended without its end"
    except (OSError, http.client.HTTPException, ValueError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    finally:
        connection.close()
    ended_s = time.time()
    return {
        "stream": stream,
        "began_s": began_s,
        "ended_s": ended_s,
        "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
        "num_chunks": num_chunks,
        "finish": finish,
        "wait_s": ended_s - began_s if wait_s is None else wait_s,
        "silence_s": 0.0 if wait_s is None else max(silence_s, ended_s - last_s),
        "error": error,
    }


def connected(url: urllib.parse.SplitResult) -> socket.socket:
    """A connection, after up to ``CONNECT_TRIES`` tries. Raises OSError."""
    for number in range(CONNECT_TRIES):
        try:
            connection = socket.create_connection((url.hostname, url.port or 80), CONNECT_S)
        except OSError:
            if number + 1 == CONNECT_TRIES:
                raise
            time.sleep(0.2)  # a pause between two tries, as clients make
        else:
            connection.settimeout(SILENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
    raise AssertionError("unreachable")


def main() -> None:
    """Send requests until /tmp/stop exists, then let the running ones finish."""
    url = urllib.parse.urlsplit(sys.argv[1])
    if len(sys.argv) > 4:
        HEADERS["Authorization"] = f"Bearer {sys.argv[4]}"
    lock = threading.Lock()

    def run(stream: int) -> None:
        while not STOP.exists():
            line = json.dumps(ask(url, stream, int(sys.argv[3])))
            with lock:
                print(line, flush=True)
            if '"error": null' not in line:
                time.sleep(0.5)  # a pause after a failed request

    threads = [threading.Thread(target=run, args=(stream,)) for stream in range(int(sys.argv[2]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("done", flush=True)


if __name__ == "__main__":
    main()
