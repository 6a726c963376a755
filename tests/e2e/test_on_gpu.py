"""A deployment on a real GPU: tokens equal those of transformers, and killed workers change no answer.

The model is small and has random weights. Its logits are spread wide, so that near ties are rare: in float32 the last
bits of a row may depend on its batch.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers
import torch
from safetensors.torch import save_file

from kvrelay.launcher.client import counter_values
from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.settings import LocalSettings
from kvrelay.launcher.verify.run import first_difference

from .conftest import wait_until_idle
from .promises import Wish, ask_alone

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(300),
]

START_S, PATIENCE_S = 80, 120  # for a start with kernels to compile, and for an answer beside other work
DECODES = ("decode-0", "decode-1")
VOCAB, HIDDEN, MID, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 512, 256, 512, 4, 4, 2, 64
LOGIT_STD = 4.0
NUM_BEFORE = 8  # tokens of each stream that the client has before a decode worker is killed
LOG_LINES = 25  # of each component, shown if a test fails


def text(seed: int, num_tokens: int) -> str:
    """A prompt of random words, each of which is one token."""
    return " ".join(f"w{token}" for token in random.Random(seed).choices(range(3, VOCAB), k=num_tokens))


def wishes(lengths: tuple[int, ...], max_tokens: int, salt: str) -> dict[str, Wish]:
    """Requests with prompts of these lengths: every second one greedy, the others sampled, some with penalties.

    ``salt``: requests with different salts share no cached blocks.
    """
    made: dict[str, Wish] = {}
    for seed, length in enumerate(lengths):
        fields: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "cache_salt": salt}
        if seed % 2:
            fields |= {"temperature": 1.0, "seed": seed}
        if seed % 4 == 3:
            fields |= {"top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.4}
        made[f"{length} tokens, {'sampled' if seed % 2 else 'greedy'} {seed}"] = Wish(text(seed, length), fields)
    return made


def short(salt: str) -> dict[str, Wish]:
    """Requests whose answers are long enough that a decode worker can be killed meanwhile."""
    return wishes((5, 9, 16, 17, 33, 40, 64, 70), max_tokens=400, salt=salt)


def long(salt: str) -> dict[str, Wish]:
    """Requests whose prompts need dozens of steps each, so that a prefill worker can be killed meanwhile."""
    return wishes((700, 640, 901, 800, 512, 777, 850, 600, 720, 650, 875, 550), max_tokens=24, salt=salt)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a Llama with random weights, and a tokenizer with one token for each word."""
    path = tmp_path_factory.mktemp("gpu") / "tiny"
    path.mkdir()
    generator = torch.Generator().manual_seed(5)
    # Queries and keys are larger, so that attention is not uniform and wrong K/V show.

    def drawn(num_outs: int, num_ins: int, scale: float = 1.0) -> torch.Tensor:
        """A matrix whose products are about ``scale`` times as large as what comes in."""
        return torch.empty(num_outs, num_ins).normal_(std=scale / num_ins**0.5, generator=generator)

    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": drawn(VOCAB, HIDDEN, LOGIT_STD),
    }
    for index in range(LAYERS):
        layer = {
            "input_layernorm": torch.ones(HIDDEN),
            "self_attn.q_proj": drawn(HEADS * HEAD_DIM, HIDDEN, 1.5),
            "self_attn.k_proj": drawn(KV_HEADS * HEAD_DIM, HIDDEN, 1.5),
            "self_attn.v_proj": drawn(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": drawn(HIDDEN, HEADS * HEAD_DIM, 1.5),
            "post_attention_layernorm": torch.ones(HIDDEN),
            "mlp.gate_proj": drawn(MID, HIDDEN),
            "mlp.up_proj": drawn(MID, HIDDEN),
            "mlp.down_proj": drawn(HIDDEN, MID),
        }
        tensors |= {f"model.layers.{index}.{name}.weight": value for name, value in layer.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": MID, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    words = {f"w{index}": index for index in range(VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def log_tail(deployment: LocalDeployment, start: int) -> str:
    """The last lines of each component, of those from line ``start`` on."""
    by_name: dict[str, list[str]] = {}
    for line in deployment.log.lines[start:]:
        by_name.setdefault(line.partition(" | ")[0], []).append(line)
    return "\n".join("\n".join(lines[-LOG_LINES:]) for lines in by_name.values()) + "\n"


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, directory: Path) -> Iterator[LocalDeployment]:
    """A prefill worker and two decode workers on one GPU, in the dtype that is the parameter.

    Steps are small, so that a long prompt takes many. Few sequences at a time need few CUDA graphs.
    """
    settings = LocalSettings.of(
        port=0, decode=2, device=DEVICE, dtype=request.param, local_prefill="fallback", kv_memory_mb=256,
        max_num_seqs=16, max_batched_tokens=32, threads=1, room_timeout_s=PATIENCE_S,
    )  # fmt: skip
    with LocalDeployment.from_settings(settings, directory) as deployment:
        try:
            deployment.wait_ready(timeout_s=START_S)
        except Exception:
            sys.stdout.write(log_tail(deployment, 0))
            raise
        yield deployment


@pytest.fixture
def deployment(started: LocalDeployment) -> Iterator[LocalDeployment]:
    """``started`` with all workers up. What the components logged during a test is shown if the test fails."""
    start = len(started.log.lines)
    try:
        started.wait_ready(timeout_s=START_S)
        yield started
    finally:
        sys.stdout.write(log_tail(started, start))


class Stream:
    """One streamed request. ``token_ids`` grows while it runs."""

    def __init__(self, wish: Wish) -> None:
        self.token_ids: list[int] = []
        self.is_under_way = asyncio.Event()  # there are at least ``NUM_BEFORE`` tokens
        self._body = {**wish.body, "stream": True}

    async def run(self, client: httpx.AsyncClient) -> list[int]:
        """Read the stream to its end and return all token ids."""
        async with client.stream("POST", "/v1/completions", json=self._body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    self.token_ids += event["choices"][0]["token_ids"]
                    if len(self.token_ids) >= NUM_BEFORE:
                        self.is_under_way.set()
        return self.token_ids


def counted(deployment: LocalDeployment, worker: str, counter: str, **labels: str) -> float:
    """The sum of a component's counter."""
    return sum(counter_values(deployment.admin_urls[worker], counter, labels))


def num_handed_over(deployment: LocalDeployment) -> float:
    """The number of prompts that the decode workers got from a prefill worker."""
    return sum(counted(deployment, worker, "kvrelay_handoffs_total", outcome="verified") for worker in DECODES)


def num_in_hand(client: httpx.Client, deployment: LocalDeployment, worker: str) -> int:
    """The number of requests that the worker has."""
    return len(client.get(f"{deployment.admin_urls[worker]}/debug/kv").json()["requests"])


async def with_a_kill(
    deployment: LocalDeployment, asked: Mapping[str, Wish], choose: Callable[[list[Stream]], str | None]
) -> dict[str, list[int]]:
    """Stream all requests at once, and kill the worker that ``choose`` names. Returns the token ids of each answer.

    ``choose``: called on a thread until it names a worker.
    """
    streams = {name: Stream(wish) for name, wish in asked.items()}
    limits = httpx.Limits(max_connections=len(asked))
    async with httpx.AsyncClient(base_url=deployment.url, timeout=PATIENCE_S, limits=limits) as client:
        running = [asyncio.create_task(stream.run(client)) for stream in streams.values()]
        try:
            while (victim := await asyncio.to_thread(choose, list(streams.values()))) is None:
                assert not all(task.done() for task in running), "all answers ended before a worker was killed"
                await asyncio.sleep(0.001)  # polls; the test's timeout bounds it
            os.kill(deployment.pids[victim], signal.SIGKILL)
            answers = await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    return dict(zip(asked, answers, strict=True))


async def undisturbed(deployment: LocalDeployment, asked: Mapping[str, Wish]) -> dict[str, list[int]]:
    """The token ids of the answers to one request at a time."""
    answers = await ask_alone(deployment.url, asked)
    return {name: answer.outputs[0] for name, answer in answers.items()}


def assert_answers(dtype: str, answers: Mapping[str, list[int]], expected: Mapping[str, list[int]]) -> None:
    """In float32 all token ids are equal. In bfloat16 answers are whole, and most begin with the same token."""
    if dtype == "float32":
        different = {name: first_difference(ids, answers[name]) for name, ids in expected.items()}
        assert not any(different.values()), {name: where for name, where in different.items() if where is not None}
        return
    assert {name: len(ids) for name, ids in answers.items()} == {name: len(ids) for name, ids in expected.items()}
    assert all(0 <= token < VOCAB for ids in answers.values() for token in ids)
    same = [name for name, ids in expected.items() if answers[name][0] == ids[0]]
    assert len(same) > len(expected) / 2, (answers, expected)


@pytest.mark.parametrize("started", ["float32"], indirect=True)
def test_it_says_what_transformers_says(deployment: LocalDeployment, directory: Path, tmp_path: Path) -> None:
    """`kvrelay verify` passes with transformers on the same GPU, and every prompt is handed over."""
    lengths = (1, 2, 15, 16, 17, 33, 100, 130)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text(length, length)}) + "\n" for length in lengths))
    arguments = ["--dtype", "float32", "--device", DEVICE, "--prompts", str(prompts), "--max-tokens", "24"]
    before = num_handed_over(deployment)
    done = subprocess.run(
        [
            sys.executable, "-P", "-m", "kvrelay.launcher", "verify", "--model", str(directory), "--url", deployment.url,
            "--concurrency", str(len(lengths)), *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert num_handed_over(deployment) - before >= len(lengths), (
        "prompts were not handed over, so equal tokens do not prove the hand-off"
    )
    wait_until_idle(deployment)


@pytest.mark.parametrize(("started", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16")], indirect=["started"])
async def test_killed_workers_change_no_answer(deployment: LocalDeployment, dtype: str) -> None:
    """A decode worker is killed while it generates, then the prefill worker while it computes prompts.

    The launcher restarts both, and at the end every block is free or cached.
    """
    expected = await undisturbed(deployment, {**short("alone"), **long("alone")})
    assert len({tuple(ids) for ids in expected.values()}) == len(expected), "each request has an answer of its own"
    before = counted(deployment, "gateway", "kvrelay_attempts_total", outcome="peer_lost")
    with httpx.Client(timeout=30) as client:

        def decodes_most(streams: list[Stream]) -> str | None:
            """The decode worker with most requests, once all have tokens."""
            if not all(one.is_under_way.is_set() for one in streams):
                return None
            return max(DECODES, key=lambda worker: num_in_hand(client, deployment, worker))

        def has_prompts(_: list[Stream]) -> str | None:
            """The prefill worker, once it has several prompts, of which it computes one."""
            return "prefill-0" if num_in_hand(client, deployment, "prefill-0") >= 3 else None

        answers = await with_a_kill(deployment, short("decode"), decodes_most)
        assert_answers(dtype, answers, {name: expected[name] for name in answers})
        after = counted(deployment, "gateway", "kvrelay_attempts_total", outcome="peer_lost")
        assert after > before, "no request was at the decode worker when it was killed"
        answers = await with_a_kill(deployment, long("prefill"), has_prompts)
        assert_answers(dtype, answers, {name: expected[name] for name in answers})
    await asyncio.to_thread(deployment.wait_ready, timeout_s=START_S)
    await asyncio.to_thread(wait_until_idle, deployment)
