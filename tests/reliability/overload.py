"""Overload: how many requests are answered in time, as the load grows to many times the capacity.

    python -m tests.reliability.overload [--seconds 20] [--seed 1]

Gateway and workers are processes, and the fake engines have a steady pace, so that the capacity is known. Requests are a Poisson
process at multiples of the capacity. Each request has an X-Request-Timeout. *Goodput* counts the requests that are answered in full
within that time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvrelay.launcher.bench.client import Answer, StreamingClient

from .fleet import Fleet, fleet

CLIENT_WAITS_S = 4.0
OUTPUT_TOKENS = 40
PROMPT_TOKENS = 60
MAX_NUM_SEQS = 16
STEP_MS = 20.0
CAPACITY = MAX_NUM_SEQS / (OUTPUT_TOKENS * STEP_MS / 1000)  # requests per second, if all steps are full


@dataclass(frozen=True)
class Outcome:
    """The figures of one load."""

    factor: float
    offered: int
    good: int
    refused: int
    late: int  # requests that timed out, or whose answer came too late
    other: Counter[str]
    refusal_p99_s: float
    goodput: float  # requests per second
    gateway_mib: float

    def line(self) -> str:
        """The figures as a line of text."""
        other = f", else {dict(self.other)}" if self.other else ""
        return (
            f"{self.factor:4.1f} x capacity: {self.offered} offered, {self.good} in time ({self.goodput:.1f}/s), "
            f"{self.refused} refused (p99 after {1000 * self.refusal_p99_s:.0f} ms), {self.late} late{other}; "
            f"gateway {self.gateway_mib:.0f} MiB"
        )


async def offer(up: Fleet, factor: float, seconds: float, seed: int) -> Outcome:
    """Send requests as a Poisson process at ``factor`` times the capacity for ``seconds``."""
    chance = random.Random(seed)
    gateway = up.members["gateway-0"]
    headers = {"x-request-timeout": str(CLIENT_WAITS_S)}
    client = StreamingClient(
        gateway.url, "completions", timeout_s=CLIENT_WAITS_S + 10, clock=time.monotonic, headers=headers
    )
    tasks: list[asyncio.Task[Answer]] = []
    next_s = begun_s = time.monotonic()
    while (next_s := next_s + chance.expovariate(factor * CAPACITY)) < begun_s + seconds:
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        prompt = [chance.randrange(1000, 20_000) for _ in range(PROMPT_TOKENS)]
        body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
        usage = {"stream_options": {"include_usage": True}}
        ask = client.ask(json.dumps(body | usage).encode(), exact_tokens=OUTPUT_TOKENS)
        tasks.append(asyncio.create_task(ask))
    answers = await asyncio.gather(*tasks)
    await client.close()
    kinds = Counter(_kind(answer) for answer in answers)
    refusals = sorted(one.finished_s - one.sent_s for one in answers if _kind(one) == "refused")
    # Goodput of the steady state: the first quarter is left out, in which the workers are still empty.
    middle = [one for one in answers if begun_s + seconds / 4 <= one.sent_s < begun_s + seconds]
    return Outcome(
        factor=factor,
        offered=len(answers),
        good=kinds["good"],
        refused=kinds["refused"],
        late=kinds["late"],
        other=Counter({kind: count for kind, count in kinds.items() if kind not in ("good", "refused", "late")}),
        refusal_p99_s=refusals[int(0.99 * len(refusals))] if refusals else 0.0,
        goodput=sum(_kind(one) == "good" for one in middle) / (0.75 * seconds),
        gateway_mib=gateway.figures().rss_mib,
    )


def _kind(answer: Answer) -> str:
    if answer.error is None:
        return "good" if answer.finished_s - answer.sent_s <= CLIENT_WAITS_S else "late"
    if answer.error == "http 503":
        return "refused"
    text = answer.error_text or ""
    is_timeout = answer.error == "http 504" or "longer than" in text or "time is up" in text
    return "late" if is_timeout else f"{answer.error}: {text}"


async def run(model: Path, factors: list[float], seconds: float, seed: int) -> list[Outcome]:
    """Run all loads on one fleet, one after the other. Checks that the workers hold nothing at the end."""
    outcomes: list[Outcome] = []
    options = ["--engine", "fake", "--fake-step-ms", str(STEP_MS), "--fake-token-us", "50"]
    options += ["--num-blocks", "512", "--max-num-seqs", str(MAX_NUM_SEQS)]
    with tempfile.TemporaryDirectory() as directory:
        async with fleet(
            Path(directory),
            model=model,
            num_prefills=1,
            num_decodes=1,
            num_gateways=1,
            worker_options=options,
            gateway_options=["--local-prefill", "fallback"],
        ) as up:
            await offer(up, 1.0, min(3.0, seconds), seed)  # warms up; the gateway learns how long requests take
            for factor in factors:
                outcomes.append(await offer(up, factor, seconds, seed))
                sys.stdout.write(outcomes[-1].line() + "\n")
                sys.stdout.flush()
            await up.wait_idle(15.0)
    return outcomes


def verdict(outcomes: list[Outcome], *, at_least: float) -> list[str]:
    """All problems; empty if there are none."""
    best = max(outcome.goodput for outcome in outcomes)
    problems = [
        f"goodput at {outcome.factor:g} x is {outcome.goodput / best:.2f} of its maximum; it must be {at_least:g}"
        for outcome in outcomes
        if outcome.factor > 1 and outcome.goodput < at_least * best
    ]
    problems += [
        f"at {one.factor:g} x something else than an answer or a refusal: {one.other}" for one in outcomes if one.other
    ]
    grown_mib = outcomes[-1].gateway_mib - outcomes[0].gateway_mib
    if grown_mib > 40:
        problems.append(f"the gateway grew by {grown_mib:.0f} MiB")
    return problems


def main() -> int:
    """Print a line for each load; 1 if goodput falls below 80 % of its maximum."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    from kvrelay.launcher.models import resolve_model  # noqa: PLC0415 - only what is run needs a tokenizer

    factors = [0.5, 0.8, 1.0, 1.5, 2.0, 5.0, 10.0]
    outcomes = asyncio.run(run(resolve_model("demo"), factors, arguments.seconds, arguments.seed))
    best = max(outcome.goodput for outcome in outcomes)
    shares = ", ".join(f"{outcome.factor:g} x {outcome.goodput / best:.2f}" for outcome in outcomes)
    sys.stdout.write(f"goodput as a share of its maximum: {shares} (capacity by design {CAPACITY:.1f}/s)\n")
    problems = verdict(outcomes, at_least=0.8)
    for problem in problems:
        sys.stdout.write(f"FAILED: {problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
