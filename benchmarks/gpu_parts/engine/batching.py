"""Throughput of many concurrent requests: kvrelay's engine against transformers' continuous batching, with the same weights."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from gpu_parts.engine.model_dir import model_directory
from gpu_parts.engine.stepping import DecodeDriver, load_engine
from gpu_parts.frame.rows import Against, Goal, Peer, Row, Unit
from gpu_parts.frame.running import Context, Fact, Finding, Note
from gpu_parts.frame.sizes import BLOCK_SIZE, Batching
from kvrelay.decode_worker.settings import DecodeSchedulerSettings

_FACT = "kvrelay's tokens/s"
# Tokens of a step. There is no ITL budget, so that prompts, which arrive all at once, do not queue.
_CHUNK = 8192
_GOAL = Goal("≥ 4x transformers' continuous batching", Against.PEER, 4.0, is_at_least=True)


def measure_ours(context: Context) -> Iterator[Finding]:
    """Prefill and decode all requests on one engine; output tokens per second. The peer's section makes the row."""
    load = context.sizes.batching
    num_blocks = (load.num_requests + 1) * -(-(load.input_len + load.output_len + 1) // BLOCK_SIZE)
    max_batched_tokens = max(_CHUNK, load.num_requests)
    engine = load_engine(
        context, num_blocks, max_num_seqs=load.num_requests, max_batched_tokens=max_batched_tokens, decodes=True
    )
    yield Note(f"loaded, {context.remaining_s:.0f} s left")
    settings = DecodeSchedulerSettings(
        max_num_seqs=load.num_requests, max_batched_tokens=max_batched_tokens, itl_budget_ms=0
    )
    driver = DecodeDriver(engine, settings=settings, seed=context.seed)
    for is_warm_up in (True, False):
        before = driver.num_tokens
        for _ in range(load.num_requests):
            driver.add_prompt(load.input_len, load.output_len)
        seconds = driver.run()
        rate = (driver.num_tokens - before) / seconds
        yield Note(f"{'warm-up' if is_warm_up else 'counted'}: {rate:,.0f} tokens/s")
    yield Fact(_FACT, rate)


def measure_theirs(context: Context) -> Iterator[Finding]:
    """Measure transformers, then make the row of both."""
    load = context.sizes.batching
    ours = context.facts.get(_FACT)
    name = f"{load.num_requests} requests at once, {load.input_len} in, {load.output_len} out"
    try:
        rate, label = _transformers(context, load)
        peer = Peer(label, rate)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        peer = Peer("transformers' continuous batching", None, f"{type(error).__name__}: {lines[0][:120]}")
    note = "" if ours is not None else "kvrelay's own part was not measured"
    yield Row(name, Unit.TOKENS_PER_S, ours, goals=(_GOAL,), peers=(peer,), note=note)


def _transformers(context: Context, load: Batching) -> tuple[float, str]:
    from transformers import (  # noqa: PLC0415 - a peer's import is part of its absence
        AutoModelForCausalLM,
        ContinuousBatchingConfig,
        GenerationConfig,
    )

    # "sdpa" is the fastest without a further package; transformers does its own paging.
    model = AutoModelForCausalLM.from_pretrained(
        model_directory(context), dtype=context.dtype, attn_implementation="sdpa", device_map=context.device_type
    ).eval()
    config = ContinuousBatchingConfig(
        max_requests_per_batch=load.num_requests,
        max_batch_tokens=max(_CHUNK, load.num_requests),
        allow_block_sharing=False,
        **({"num_blocks": 8} if context.is_dry else {"max_memory_percent": 0.5}),
    )
    generation = GenerationConfig(max_new_tokens=load.output_len, do_sample=False, eos_token_id=-1, pad_token_id=0)
    generator = torch.Generator().manual_seed(context.seed)
    rate = 0.0
    for _ in ("warm-up", "counted"):
        sizes = (load.num_requests, load.input_len)
        prompts = torch.randint(3, context.sizes.shape.vocab_size, sizes, generator=generator).tolist()
        begun_s = time.perf_counter()
        answers = model.generate_batch(
            prompts, generation, config, max_new_tokens=load.output_len, persistent_manager=True
        )
        seconds = time.perf_counter() - begun_s
        num_tokens = sum(len(answer.generated_tokens) for answer in answers.values())
        if num_tokens != load.num_requests * load.output_len:
            raise RuntimeError(f"{num_tokens} tokens came of {load.num_requests} x {load.output_len}")
        rate = num_tokens / seconds
    return rate, f"transformers' continuous batching ({model.config._attn_implementation})"
