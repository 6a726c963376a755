"""The cost of adapters in a decode step on a CPU: one batch with an adapter for each row, and without adapters, in turns.

    python benchmarks/adapters.py
    python benchmarks/adapters.py --rows 32 --adapters 1 --rank 64

The adapters have random weights for all seven projections of all layers. Both kinds of steps run in pairs over the same blocks in
one process, so other load on the machine affects both. Printed are medians of the times and of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvrelay.common.adapter_files import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.config.model import ModelConfig, load_config
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.launcher.models import resolve_model

BLOCK_SIZE = 16


def write_adapter(directory: Path, config: ModelConfig, rank: int, seed: int) -> None:
    """Write an adapter of all projections, in bf16."""
    hidden, mid, q_size, kv_size = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    shapes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (mid, hidden),
        "mlp.up_proj": (mid, hidden),
        "mlp.down_proj": (hidden, mid),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config.num_layers):
        for name, (num_outputs, num_inputs) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}.lora_"
            a = torch.randn(rank, num_inputs, generator=generator) / num_inputs
            tensors[f"{key}A.weight"] = a.bfloat16()
            tensors[f"{key}B.weight"] = torch.randn(num_outputs, rank, generator=generator).bfloat16()
    directory.mkdir()
    (directory / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    save_file(tensors, directory / WEIGHTS_FILE)


def make_sequences(num_rows: int, context: int) -> list[Sequence]:
    """Decoding sequences, whose K/V are arbitrary content of the pool."""
    num_blocks = context // BLOCK_SIZE + 1
    sequences: list[Sequence] = []
    for row in range(num_rows):
        tokens = [(row * 977 + place * 31) % 20_000 for place in range(context)]
        params = SamplingParams(max_tokens=10_000, temperature=0.0)
        sequence = Sequence(f"r{row}", 1, tokens, context, params, 0.0)
        sequence.block_tables = [list(range(row * num_blocks, (row + 1) * num_blocks))]
        sequence.num_computed_tokens = context - 1
        sequences.append(sequence)
    return sequences


def seconds_of(leader: Leader, sequences: list[Sequence], slots: list[int]) -> float:
    """Seconds of one step over all ``sequences``, which it does not change. ``slots``: of their adapters."""
    for sequence, slot in zip(sequences, slots, strict=True):
        sequence.adapter = slot
    begun_s = time.perf_counter()
    leader.step([StepRow(sequence, 1) for sequence in sequences])
    return time.perf_counter() - begun_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    model_dir = resolve_model(args.model)
    options = EngineOptions(
        model_dir=model_dir,
        model_id="demo",
        device="cpu",
        num_blocks=args.rows * (args.context // BLOCK_SIZE + 1),
        max_num_seqs=args.rows,
        num_threads=args.threads,
        adapter_bytes=2**30,
    )
    engine = TorchEngine.load(options, lambda done, total: None)
    assert engine.adapters is not None, "the engine is started for adapters"
    with tempfile.TemporaryDirectory() as root:
        for slot in range(1, args.adapters + 1):
            directory = Path(root, f"a{slot}")
            write_adapter(directory, load_config(model_dir), args.rank, slot)
            begun_s = time.perf_counter()
            engine.adapters.load(slot, directory, adapter_digest(directory))
        load_s = time.perf_counter() - begun_s
    leader, sequences = Leader(engine), make_sequences(args.rows, args.context)
    kinds = {"without": [0] * args.rows, "with": [1 + row % args.adapters for row in range(args.rows)]}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for pair in range(-5, args.pairs):
        for kind in sorted(kinds, reverse=bool(pair % 2)):
            step_s = seconds_of(leader, sequences, kinds[kind])
            if pair >= 0:
                times[kind].append(step_s)
    ratios = [one / other for one, other in zip(times["with"], times["without"], strict=True)]
    print(f"{args.rows} rows, {args.adapters} adapters of rank {args.rank}, {args.threads} threads, {args.pairs} pairs")
    for kind, found in times.items():
        print(f"a step {kind} adapters: {statistics.median(found) * 1e3:.2f} ms")
    print(f"ratio: {statistics.median(ratios):.3f}")
    print(f"the last adapter was loaded in {load_s * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
