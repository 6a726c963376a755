"""Three load generators with the same load: `kvrelay bench`, `vllm bench serve` and guidellm; each reads its own result.

Their words differ. TPOT here is (last token - first) / (tokens - 1) per request: vllm calls it TPOT, guidellm inter-token
latency. Guidellm knows no single gaps, so the inter-token latency is compared with vllm only.

TTFT does not begin at the same moment. Ours begins before a connection is taken or made, and so does vllm's, which then still
writes its body as JSON; guidellm's begins when the request's headers are written, behind the connecting. And the two others send
text, which the server has to tokenize: compare with a load whose ``api`` is text. (As read in vllm 0.32.0 and guidellm 0.8.1.)
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.launcher.bench.records import CpuUse, RunResult
from kvrelay.launcher.bench.summary import summarize
from peers.errors import PeerError
from peers.figures import Values
from peers.load import Load, failures
from peers.metered import run_metered
from peers.sides import Places

_RUN_S = 400.0
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, slots=True)
class Generated:
    """What a generator says of its run."""

    num_answers: int  # that its figures are of
    values: Values
    cpu: CpuUse | None


@dataclass(frozen=True, slots=True)
class Generator(ABC):
    """A load generator of somebody else."""

    name: str
    places: Places
    url: str
    model: str

    @abstractmethod
    def command(self, load: Load, seed: int, output: Path) -> list[str]:
        """What runs ``load`` and writes ``output``."""

    @abstractmethod
    def values(self, document: dict[str, Any]) -> tuple[int, Values]:
        """Requests that succeeded, and the figures."""

    def measure(self, load: Load, seed: int, server_pids: Callable[[], Iterable[int]]) -> Generated:
        """Run it, and watch the CPU. Raises PeerError if it fails, or if not all requests were answered."""
        output = self.places.work / f"{self.name}.json"
        output.unlink(missing_ok=True)
        log = self.places.work / f"{self.name}.log"
        try:
            status, cpu = run_metered(
                self.command(load, seed, output),
                environment={**os.environ, **_OFFLINE},
                log=log,
                limit_s=_RUN_S,
                server_pids=server_pids,
            )
        except OSError as error:
            raise PeerError(f"{self.name}: {error}; see {log}") from error
        if status != 0 or not output.exists():
            raise PeerError(f"{self.name} ended with status {status}; see {log}")
        num_ok, values = self.values(json.loads(output.read_text()))
        num_asked = load.requests or 0
        if num_ok < num_asked - (load.rate is not None):  # guidellm ends a run at a rate without its last request
            raise PeerError(f"{self.name}: {num_ok} of {num_asked} requests succeeded; see {log}")
        return Generated(num_ok, values, cpu)


class VllmBench(Generator):
    """`vllm bench serve`."""

    def command(self, load: Load, seed: int, output: Path) -> list[str]:
        pace = ["--max-concurrency", str(load.concurrency)]
        if load.rate is not None:
            pace = ["--request-rate", str(load.rate), "--burstiness", "inf"]  # all gaps the same
        return [
            *(self.places.program("vllm", "vllm"), "bench", "serve", "--backend", "openai", "--disable-tqdm"),
            *("--base-url", self.url, "--model", self.model, "--tokenizer", str(self.places.model)),
            *("--dataset-name", "random", "--random-input-len", str(load.input_len), "--seed", str(seed)),
            *("--random-output-len", str(load.output_len), "--num-prompts", str(load.requests)),
            *(*pace, "--ignore-eos", "--temperature", "0"),
            *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50", "--save-result"),
            *("--result-dir", str(output.parent), "--result-filename", output.name),
        ]

    def values(self, document: dict[str, Any]) -> tuple[int, Values]:
        return int(document["completed"]), {
            "tokens_per_s": float(document["output_throughput"]),
            "ttft_p50_s": document["median_ttft_ms"] / 1e3,
            "ttft_mean_s": document["mean_ttft_ms"] / 1e3,
            "tpot_p50_s": document["median_tpot_ms"] / 1e3,
            "itl_p50_s": document["median_itl_ms"] / 1e3,
        }


class Guidellm(Generator):
    """guidellm."""

    def command(self, load: Load, seed: int, output: Path) -> list[str]:
        profile = f"kind=concurrent,streams={load.concurrency}"
        if load.rate is not None:
            profile = f"kind=constant,rate={load.rate}"
        backend = f"kind=openai_http,target={self.url},model={self.model},request_format=/v1/completions"
        return [
            *(self.places.program("guidellm", "guidellm"), "run", "--disable-console"),
            *("--backend", f"{backend},validate_backend=false"),  # it would ask for /health, which is not OpenAI's
            *("--profile", profile),
            *("--constraint", f"kind=max_requests,count={load.requests}"),
            *("--tokenizer", f"kind=huggingface_auto,model={self.places.model}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={load.input_len},output_tokens={load.output_len}"),
            *("--seed", f"kind=static,value={seed}", "--output", f"kind=json,path={output}"),
        ]

    def values(self, document: dict[str, Any]) -> tuple[int, Values]:
        metrics = document["benchmarks"][0]["metrics"]
        return int(metrics["request_totals"]["successful"]), {
            "tokens_per_s": float(metrics["output_tokens_per_second"]["successful"]["mean"]),
            "ttft_p50_s": metrics["time_to_first_token_ms"]["successful"]["median"] / 1e3,
            "ttft_mean_s": metrics["time_to_first_token_ms"]["successful"]["mean"] / 1e3,
            "tpot_p50_s": metrics["inter_token_latency_ms"]["successful"]["median"] / 1e3,
        }


def ours(result: RunResult) -> Generated:
    """The same of `kvrelay bench`. Raises PeerError if a request failed."""
    failed = failures(result)
    if failed:
        raise PeerError(f"kvrelay bench: {len(failed)} requests failed: {failed[0].error}: {failed[0].error_text}")
    whole = summarize(result).all
    assert whole.ttft_from_send is not None, "no request succeeded, and none failed"
    ttft = whole.ttft_from_send
    values = {"tokens_per_s": whole.output_tokens_per_s, "ttft_p50_s": ttft.p50, "ttft_mean_s": ttft.mean}
    if whole.tpot is not None and whole.itl is not None:
        values |= {"tpot_p50_s": whole.tpot.p50, "itl_p50_s": whole.itl.p50}
    return Generated(whole.num_ok, values, result.cpu)
