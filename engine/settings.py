"""The settings of a worker's engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.settings import setting

DEFAULT_BLOCK_SIZE = 16  # tokens
_PROMPT_STEP_TOKENS = {"cpu": 512, "cuda": 2048}
_SEQUENCES_AT_A_TIME = {"cpu": 64, "cuda": 256}


def prompt_step_tokens(max_batched_tokens: int | None, device_type: str) -> int:
    """Tokens of the largest step of a worker that computes prompts. None: a default for the device ("cpu" or "cuda").

    A step of 512 tokens is long for a CPU. It is too short for a GPU, where each step has a launch and reads all weights. With
    2,048 tokens these costs are small. With more, a prompt's blocks would leave later than necessary, because they are shipped
    after their step.
    """
    return _PROMPT_STEP_TOKENS[device_type] if max_batched_tokens is None else max_batched_tokens


def sequences_at_a_time(max_num_seqs: int | None, device_type: str) -> int:
    """Sequences that a worker runs at a time. None: a default for the device ("cpu" or "cuda").

    A CPU computes few rows as fast as its memory allows, and more rows take longer. A GPU reads its weights for one row or for 256,
    so fewer rows would waste it. How many sequences fit the memory shows as they run: a sequence without blocks waits or gives way.
    A slot itself is small: a row of logits, and four bytes for each block of the longest sequence.
    """
    return _SEQUENCES_AT_A_TIME[device_type] if max_num_seqs is None else max_num_seqs


@dataclass(frozen=True, slots=True)
class Guessing:
    """What guesses tokens within an engine, beside its model; by default nothing does."""

    nbytes: int = (
        0  # that it takes of a GPU when it is made, after the pool: of the first one, or with ``mtp_kv_bytes`` of all
    )
    mtp_kv_bytes: int = 0  # of the K/V of the checkpoint's layer for drafting, on each rank; 0: it is not loaded
    taps: tuple[int, ...] | None = None  # layers whose input it reads, in order, for CUDA graphs; None: nothing guesses


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The model and where it runs."""

    model: str = setting("demo", "model directory, GGUF file, Hugging Face id, or 'demo'")
    dtype: str = setting(
        "auto",
        "number format of weights and KV; the same on all workers. auto: the checkpoint's, or float32 on a CPU "
        "that cannot compute in that",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    device: str = setting(
        "auto", "where the model runs; auto takes CUDA if there is a GPU", choices=("auto", "cpu", "cuda")
    )
    kv_dtype: str = setting(
        "auto",
        "number format of KV; the same on all workers. auto: that of --dtype. fp8 (e4m3): half the memory, a "
        "little less exact; needs a GPU of compute capability 8.9 or later",
        choices=("auto", "fp8"),
    )
    backend: str = setting(
        "auto",
        "whose forward pass computes the model: ours (native), or that of transformers; the same on all workers. "
        "auto: ours where there is one",
        choices=("auto", "native", "transformers"),
    )
    tensor_parallel: int = setting(
        1,
        "GPUs for one worker: it runs so many ranks (processes), each with a part of every layer. On a CPU ranks "
        "share --threads",
        minimum=1,
        maximum=64,
    )
    pipeline_parallel: int = setting(
        1,
        "stages of one worker, each with some of the layers, on --tensor-parallel ranks. For nodes without a fast "
        "network between them; needs a native forward pass",
        minimum=1,
        maximum=64,
    )
    expert_parallel: bool = setting(
        False,
        "give each rank whole experts, instead of a part of each expert. For a mixture of experts with a native "
        "forward pass",
    )
    weight_format: str = setting(
        "full",
        "round the layers' weights to 8 bits at the start; the same on all workers. int8: on GPUs, and on CPUs in "
        "bf16. fp8 (e4m3): on GPUs of compute capability 8.9 or later",
        choices=("full", "int8", "fp8"),
    )
    fp8_activations: bool = setting(
        False,
        "multiply fp8 with fp8: round activations as a checkpoint in fp8 says. Less exact, not measured yet; the "
        "same on all workers. docs/models.md names what it needs",
    )
    cpu_kernels: str = setting(
        "auto",
        "what runs between matrix products on a CPU in bf16: our kernels (native, compiled with g++ at the first "
        "start), or torch. auto: ours where they compile",
        choices=("auto", "native", "torch"),
    )
    cuda_graphs: bool = setting(
        True,
        "prepare decode steps as CUDA graphs at the start. It takes a few seconds and some memory, and makes steps "
        "faster",
    )
    run_ahead: str = setting(
        "auto",
        "launch a decode step before the tokens of the last one have come to the host. auto: on a GPU",
        choices=("auto", "on", "off"),
    )
    max_model_len: int | None = setting(
        None,
        "longest prompt and output together; default: the model's own, bounded by the pool",
        unit="tokens",
        minimum=16,
    )
    logits_processors: tuple[str, ...] = setting(
        (),
        "names of logits processors that requests may ask for; the same on all workers. Installed packages bring "
        "them, by entry points kvrelay.logits_processors",
    )
    adapters: str | None = setting(
        None,
        "directory of LoRA adapters as PEFT saves them, each in a folder by its name; the same on workers and gateways",
    )
    adapter_memory_mb: int = setting(
        512, "memory for adapters; the least recently used ones make room for others", unit="MiB", minimum=1
    )
    threads: int | None = setting(
        None, "CPU threads of the model; default: as many as the process has cores", minimum=1, maximum=1024
    )

    @property
    def num_ranks(self) -> int:
        """The ranks of a worker in all stages."""
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The hosts of a worker with ranks on several hosts."""

    nodes: int = setting(
        1,
        "hosts of this worker, each with as many ranks. Start the same command on all of them: the first is the "
        "worker, the others only compute",
        minimum=1,
        maximum=64,
    )
    node_rank: int = setting(0, "which of --nodes this is; 0 is the worker", minimum=0)
    node_name: str | None = setting(
        None,
        "instead of --node-rank: NAME-N, as pods of a StatefulSet are called. The first of each --nodes neighbours "
        "is the worker; its name replaces {leader} in --leader-address",
    )
    leader_address: str | None = setting(
        None, "tcp://HOST:PORT where node 0 listens for ranks of the other nodes; these connect to it"
    )


@dataclass(frozen=True, slots=True)
class FakeSettings:
    """An engine without a model, for tests of everything around it: made-up tokens at a given pace, with real KV bytes."""

    engine: str = setting(
        "model", "what computes: the model, or a fake without weights, for tests and load", choices=("model", "fake")
    )
    fake_step_ms: float = setting(10.0, "time of a step of the fake engine", unit="ms", minimum=0)
    fake_token_us: float = setting(50.0, "time of each token of a prompt on top", unit="us", minimum=0)
    fake_token_bytes: int = setting(1024, "bytes of KV per token; the same on all workers", minimum=8, maximum=2**20)

    @property
    def is_fake(self) -> bool:
        """Whether the fake engine takes the place of a model."""
        return self.engine == "fake"


@dataclass(frozen=True, slots=True)
class KvSettings:
    """The KV pool."""

    block_size: int | None = setting(
        None,
        "tokens per KV block; the same on all workers. Default: 16; with recurrent layers 64 to 512, by the size of "
        "their states. With 64, prefill attention uses TMA on Hopper GPUs",
        unit="tokens",
        minimum=1,
        maximum=512,
    )
    kv_memory_mb: int | None = setting(
        None, "memory of the KV pool; default: 1024 on CPU, --kv-memory-fraction on a GPU", unit="MiB", minimum=1
    )
    kv_memory_fraction: float = setting(
        0.9,
        "share of the GPU's memory for weights, the largest step and KV, which gets what the others leave. Workers "
        "on one GPU should have 0.9 together",
        minimum=0.01,
        maximum=1,
    )
    staging_mb: int | None = setting(
        None,
        "pinned host memory that KV blocks pass between a GPU and the network. Default: 256, or four blocks if "
        "these are more; none on a CPU",
        unit="MiB",
        minimum=1,
    )
    num_blocks: int | None = setting(None, "blocks in the KV pool, instead of --kv-memory-mb", minimum=1)
    max_retained_share: float = setting(
        0.5,
        "share of the KV pool that requests may keep cached with cache_priority",
        minimum=0,
        maximum=1,
    )
