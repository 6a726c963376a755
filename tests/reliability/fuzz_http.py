"""Requests at the gateway's HTTP port: made from its own OpenAPI document (schemathesis), and bytes that are no requests.

No answer is a 500, every answer is documented (status, content type, shape; errors are objects of OpenAI's or of TGI's shape), the
gateway lives and does not grow, and a neighbour's streams beside it have every token right.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import schemathesis
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kvrelay.engine.fake import expected_output

from ..relay.http_gateway import VOCAB
from .figures import rss_mib, run_all
from .http_garbage import send_garbage
from .served_gateway import Served, served_gateway

MAX_GROWTH_MIB = 24.0
_ANSWER_S = 30.0
_NUM_OUTPUT = 20
_CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


def fuzz_openapi(served: Served, seed: int, num_examples: int) -> str:
    """Requests that follow the document, and requests that do not; ``num_examples`` of each for every operation."""
    document = httpx.get(f"{served.url}/openapi.json", timeout=_ANSWER_S).json()
    schema = schemathesis.openapi.from_dict(document)
    statuses: collections.Counter[int] = collections.Counter()
    operations = [result.ok() for result in schema.get_all_operations()]
    for operation in operations:
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
                continue  # there is nothing to get wrong
            # What has no parameters is asked a few times.
            _run(operation, mode, served.url, seed, num_examples if operation.body else 3, statuses)
    told = ", ".join(f"{number} times {status}" for status, number in sorted(statuses.items()))
    return f"{sum(statuses.values())} requests to {len(operations)} operations: {told}"


def _run(operation: Any, mode: Any, url: str, seed: int, num_examples: int, statuses: collections.Counter[int]) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def each(case: Any) -> None:
        # Any other model's name is answered with 404 before anything else is looked at.
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str) and len(case.body["model"]) % 2:
            case.body["model"] = "tiny"
        response = case.call(base_url=url, timeout=_ANSWER_S)
        statuses[response.status_code] += 1
        assert response.status_code != 500, f"{case.body!r}: {response.text}"
        case.validate_response(response, checks=_CHECKS)
        if response.status_code >= 400:
            error = response.json()["error"]  # an object, or TGI's text
            assert error if isinstance(error, str) else error["message"], response.text

    try:
        each()
    except (Exception, BaseExceptionGroup) as error:  # schemathesis groups its failures
        raise AssertionError(f"{operation.label}: {_flat(error)}") from error


def _flat(error: BaseException) -> str:
    parts = getattr(error, "exceptions", ())
    return "; ".join([str(error), *(str(part) for part in parts)])[:1500]


def fuzz_bytes(served: Served, seed: int, num_connections: int) -> str:
    """Connections with garbage, one after another."""
    rng = random.Random(seed)
    kinds = collections.Counter(send_garbage(served.port, rng) for _ in range(num_connections))
    return f"{sum(kinds.values())} connections with garbage of {len(kinds)} kinds"


async def beside_a_neighbour(served: Served, call: Callable[[], str]) -> str:
    """The result of ``call``, with a neighbour who streams all the while and compares every token."""
    numbers = random.Random(0)
    num_answers = 0
    running = asyncio.create_task(asyncio.to_thread(call))
    async with httpx.AsyncClient(base_url=served.url, timeout=_ANSWER_S) as client:
        while not running.done() or not num_answers:
            prompt = [numbers.randrange(VOCAB) for _ in range(30)]
            got = await _streamed(client, prompt)
            expected = expected_output(prompt, _NUM_OUTPUT, VOCAB)
            assert got == expected, f"the neighbour got {got} instead of {expected}"
            num_answers += 1
    return f"{await running}; {num_answers} streams of a neighbour"


async def _streamed(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_tokens": _NUM_OUTPUT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        # By bytes: httpx's aiter_lines also ends a line at U+0085 and U+2028, which are a part of the text.
        whole = b"".join([part async for part in response.aiter_bytes()])
    *events, done = [line.removeprefix(b"data: ") for line in whole.split(b"\n") if line]
    assert done == b"[DONE]", whole[-500:]
    for event in map(json.loads, events):
        assert "error" not in event, event
        tokens += event["choices"][0]["token_ids"]
    return tokens


def fuzz(served: Served, call: Callable[[], str]) -> str:
    """``call`` beside a neighbour; raises AssertionError if the gateway's memory grows, or if it logged an error."""
    before_mib = rss_mib(served.pid)
    told = asyncio.run(beside_a_neighbour(served, call))
    after_mib = rss_mib(served.pid)
    assert after_mib - before_mib < MAX_GROWTH_MIB, f"the gateway grew from {before_mib:.1f} to {after_mib:.1f} MiB"
    errors = served.log.read_text()
    assert "Traceback" not in errors, f"the gateway logged: {errors[:3000]}"
    return f"{told}; {before_mib:.1f} MiB resident before, {after_mib:.1f} MiB after"


def main() -> int:
    """See the module; one line for each kind of requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=struct.unpack("<I", os.urandom(4))[0])
    parser.add_argument("--examples", type=int, default=800, help="per operation, right and wrong each")
    parser.add_argument("--connections", type=int, default=5000)
    given = parser.parse_args()
    sys.stdout.write(f"fuzz_http: seed {given.seed}\n")
    with tempfile.TemporaryDirectory() as directory, served_gateway(Path(directory)) as served:
        warm_up = [
            ("warm-up", lambda: fuzz(served, lambda: fuzz_openapi(served, given.seed + 1, min(100, given.examples))))
        ]
        return run_all(
            [
                *warm_up,
                ("openapi", lambda: fuzz(served, lambda: fuzz_openapi(served, given.seed, given.examples))),
                ("bytes", lambda: fuzz(served, lambda: fuzz_bytes(served, given.seed, given.connections))),
            ]
        )


if __name__ == "__main__":
    sys.exit(main())
