"""Fuzzes the gateway's HTTP port with requests from its OpenAPI document (by schemathesis), and with bytes that are no requests.

No answer may be a 500. Every answer must be documented: its status, content type and shape. The gateway must live, and its memory
may not grow. A neighbour's streams must have the right tokens meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import functools
import os
import random
import struct
import sys
import tempfile
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

from .figures import run_all
from .http_garbage import send_garbage
from .neighbour import neighbour_of, small_fleet

MAX_GROWTH_MIB = 24.0
_ANSWER_S = 30.0
_CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


def fuzz_openapi(url: str, seed: int, num_examples: int) -> str:
    """Send ``num_examples`` valid requests to each operation, and as many invalid ones."""
    document = httpx.get(f"{url}/openapi.json", timeout=_ANSWER_S).json()
    schema = schemathesis.openapi.from_dict(document)
    statuses: collections.Counter[int] = collections.Counter()
    operations = [result.ok() for result in schema.get_all_operations()]
    for operation in operations:
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
                continue  # without a body no request can be invalid
            # An operation without parameters gets three requests.
            _run(operation, mode, url, seed, num_examples if operation.body else 3, statuses)
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
        # With another model's name the answer would be a 404, and the rest of the body not be checked.
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str) and len(case.body["model"]) % 2:
            case.body["model"] = "model"
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


def fuzz_bytes(port: int, seed: int, num_connections: int) -> str:
    """Send garbage on many connections, one after another."""
    rng = random.Random(seed)
    kinds = collections.Counter(send_garbage(port, rng) for _ in range(num_connections))
    return f"{sum(kinds.values())} connections with garbage of {len(kinds)} kinds"


async def fuzz(directory: Path, seed: int, num_examples: int, num_connections: int) -> str:
    """Run both kinds of fuzzing beside a neighbour. Raises AssertionError if the gateway grows or a log has a traceback."""
    async with small_fleet(directory) as up, neighbour_of(up) as neighbour:
        gateway = up.members["gateway-0"]
        calls = [
            functools.partial(fuzz_openapi, gateway.url, seed + 1, min(100, num_examples // 3)),  # to warm up
            functools.partial(fuzz_openapi, gateway.url, seed, num_examples),
            functools.partial(fuzz_bytes, int(gateway.url.rpartition(":")[2]), seed, num_connections),
        ]
        told: list[str] = []
        for call in calls:
            before_mib = gateway.figures().rss_mib
            told += await neighbour.beside([call])
            after_mib = gateway.figures().rss_mib
            told.append(f"{before_mib:.1f} MiB resident before, {after_mib:.1f} MiB after")
            assert after_mib - before_mib < MAX_GROWTH_MIB, f"the gateway grew: {told}"
        for member in up.members.values():
            log = member.log.read_text()
            assert "Traceback" not in log, f"{member.name} logged: {log[-3000:]}"
        return "; ".join([*told, neighbour.told()])


def main() -> int:
    """See the module. Prints one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=struct.unpack("<I", os.urandom(4))[0])
    parser.add_argument("--examples", type=int, default=800, help="per operation, right and wrong each")
    parser.add_argument("--connections", type=int, default=5000)
    given = parser.parse_args()
    sys.stdout.write(f"fuzz_http: seed {given.seed}\n")
    with tempfile.TemporaryDirectory() as directory:
        work = fuzz(Path(directory), given.seed, given.examples, given.connections)
        return run_all([("http", lambda: asyncio.run(work))])


if __name__ == "__main__":
    sys.exit(main())
