"""Weights from safetensors files into packed parameters, one tensor at a time.

Parameters are allocated once, on the model's device, in the form the model computes with (q, k and v in one matrix, gate and
up in one). Of a model that is cut among ranks (:mod:`kvrelay.engine.config.cut`) only the rank's part of each tensor is read.
On a CPU every checkpoint tensor is copied from the memory-mapped file into its place, so no weight is in memory twice. On a GPU
safetensors reads it onto the device, and it is copied, and converted, into its place there: beside the parameters the device
holds one tensor at a time, as the file has it, and the host none but that one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.model import ModelConfig
from kvrelay.engine.config.quantisation import load_quantisation
from kvrelay.engine.config.tokenizer import check_tokenizer
from kvrelay.engine.weights.formats import StoredWeight
from kvrelay.engine.weights.headers import check_full, check_layers, checkpoint_files, read_headers
from kvrelay.engine.weights.kv_scales import is_attention_scale
from kvrelay.engine.weights.reader import CheckpointReader
from kvrelay.engine.weights.rounding import AnyWeight, RoundedWeight, Rounding

Progress = Callable[[int, int], None]
_SAMPLE_NBYTES = 4096  # of the digest
_WHOLE = Cut()
_Parts = tuple[tuple[str, int, range], ...]  # of a matrix: name, rows in the checkpoint, and which of them the rank has


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer, or a rank's part of it. Biases and q/k norms are None where the model has none.

    Of ranks only the first has the biases of ``o`` and ``down``: products are summed over ranks.
    """

    input_norm: torch.Tensor  # [hidden]
    qkv: AnyWeight  # [q_size + 2 * kv_size, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    o: AnyWeight  # [hidden, q_size]
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor  # [hidden]
    gate_up: AnyWeight  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: AnyWeight  # [hidden, intermediate]
    down_bias: torch.Tensor | None


@dataclass(slots=True)
class ModelWeights:
    """All weights; ``lm_head`` is ``embed`` itself where the two are tied.

    A rank's ``embed`` and ``lm_head`` have ``Cut.vocab_part`` rows, zeros behind the vocabulary's end.
    """

    embed: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden]


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    rounding: Rounding | None = None,
    cut: Cut = _WHOLE,
    keeps: Callable[[StoredWeight], bool] | None = None,
) -> ModelWeights:
    """Load a checkpoint onto ``device``. ``progress`` hears (bytes done, bytes in all).

    ``config``: of the whole model. ``cut``: the part to load; it is not rounded.
    ``rounding``: of the layers' projections, None for none; each tensor is rounded as it comes, so they are never there in full.
    ``keeps``: which projections of a quantised checkpoint stay as they are stored, where a rank has the whole model and does not
    round; the others become full.
    At most the parameters, the checkpoint's largest tensor, in the file's dtype, and what rounding 2**24 elements takes in fp32
    (some 130 MiB) are on the device at a time; what torch keeps of that for later tensors is its own. Raises ModelError as
    :func:`check_checkpoint` does, before any memory is taken, and on a GPU too small for the model.
    """
    try:
        return _load(directory, config, dtype, device, progress, rounding, cut, keeps)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the weights of {directory} in {dtype} do not fit the memory of {device} ({error}): free what others hold of it, "
            "or take a larger GPU or a smaller model"
        ) from error


def _load(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    rounding: Rounding | None,
    cut: Cut,
    keeps: Callable[[StoredWeight], bool] | None,
) -> ModelWeights:
    assert cut.is_whole or rounding is None, (
        f"rank {cut.rank} of {cut.num_ranks} would round rows of which it has a part"
    )
    # With its index, which safetensors would take for 0 if it were left out.
    device_name = str(torch.empty(0, device=device).device)
    total = sum(path.stat().st_size for path in checkpoint_files(directory)) // cut.num_ranks
    with CheckpointReader(read_headers(directory), load_quantisation(directory), dtype, device_name) as reader:
        check_checkpoint(directory, reader, config)
        may_keep = keeps is not None and rounding is None and cut.is_whole
        kept = {name: one for name, one in reader.outlines.items() if may_keep and keeps is not None and keeps(one)}
        weights, places = _allocate(config, dtype, device, rounding, cut, kept)
        for name in reader.headers:
            place = places.get(name)
            if place is None:
                continue  # the model is the same without it, or another rank has it
            if isinstance(place.target, StoredWeight):
                place.target.copy_(reader.stored(name))
            else:
                place.target.copy_(reader.part(name, place.part))
            progress(min(reader.num_bytes_read, total), total)
    progress(total, total)
    return weights


def check_checkpoint(directory: Path, reader: CheckpointReader, config: ModelConfig) -> None:
    """Whether the tensors of the checkpoint in ``directory`` are those that ``config`` asks for, by the headers of its files.

    Raises ModelError naming the file and the tensor: one is missing, unknown, of another shape, or in a format of which nothing is
    told.
    """
    headers = reader.headers
    check_layers(directory, config.num_layers, headers)
    shapes = checkpoint_shapes(config)
    if missing := sorted(shapes.keys() - headers):
        files = checkpoint_files(directory)
        where = str(files[0]) if len(files) == 1 else f"the {len(files)} files in {directory}"
        raise ModelError(f"{len(missing)} tensors are missing from {where}, the first is {missing[0]}")
    for name, header in headers.items():
        if (shape := shapes.get(name)) is None:
            _check_unused(reader, name, config)
        elif header.shape != shape:
            raise ModelError(
                f"{header.path}: tensor {name} has shape {list(header.shape)}; config.json asks for {list(shape)}"
            )
    check_full({name: header for name, header in headers.items() if name in shapes})


def check_files(directory: Path, config: ModelConfig) -> None:
    """As :func:`check_checkpoint`, and of a tokenizer beside them; of a checkpoint that nobody reads yet."""
    check_tokenizer(directory, config.vocab_size)
    with CheckpointReader(read_headers(directory), load_quantisation(directory), torch.float32, "cpu") as reader:
        check_checkpoint(directory, reader, config)


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of the model must have, by name. Takes no memory for them."""
    _, places = _allocate(config, torch.float32, torch.device("meta"), None, _WHOLE, {})
    return {name: place.shape for name, place in places.items() if place is not None}


def weights_digest(directory: Path) -> str:
    """A digest that tells checkpoints apart without reading all of them.

    It covers config.json but the version that wrote it, every file's size and safetensors header (names, shapes, types), the
    first 4 KiB of every tensor, and 64 samples of 4 KiB spread over each file. Two checkpoints of one shape that differ in a few
    single weights could share it; a fine-tune, even of norms alone, another quantization or another training step does not.
    The files must be whole, as they are once they were loaded.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config.pop("transformers_version", None)  # workers of two releases may have converted one model each
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in checkpoint_files(directory):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            digest.update(header)
            data_start = 8 + len(header)
            for name, tensor in sorted(json.loads(header).items()):
                if name != "__metadata__":
                    start, end = tensor["data_offsets"]
                    file.seek(data_start + start)
                    digest.update(file.read(min(_SAMPLE_NBYTES, end - start)))
            for sample in range(64):
                file.seek(size * sample // 64)
                digest.update(file.read(_SAMPLE_NBYTES))
    return digest.hexdigest()


def _check_unused(reader: CheckpointReader, name: str, config: ModelConfig) -> None:
    """Raise ModelError for a tensor we have no use for, unless the model is the same without it."""
    is_tied_head = name == "lm_head.weight" and config.has_tied_embeddings
    is_rotary_buffer = name.endswith(".rotary_emb.inv_freq")  # of old checkpoints, follows from the config
    if is_tied_head or is_rotary_buffer or is_attention_scale(name) or reader.is_zero_bias(name):
        return
    raise ModelError(
        f"{reader.headers[name].path}: tensor {name} is unknown to {config.architecture} with this config.json; it would be ignored"
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor of the checkpoint belongs."""

    target: AnyWeight
    shape: tuple[int, ...]  # of the tensor …
    part: tuple[range, ...]  # … and which of it the target holds, for each dimension


def _allocate(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    rounding: Rounding | None,
    cut: Cut,
    kept: Mapping[str, StoredWeight],
) -> tuple[ModelWeights, dict[str, _Place | None]]:
    """Empty parameters, and where each checkpoint tensor belongs in them; None: it is another rank's.

    ``kept``: weights that stay as they are stored, if all parts of a matrix are, in one form.
    """
    places: dict[str, _Place | None] = {}

    def parameter(name: str, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        places[name] = _Place(tensor, shape, tuple(map(range, shape)))
        return tensor

    def of_vocab(name: str) -> torch.Tensor:
        tokens, num_rows = cut.vocab(config.vocab_size), cut.vocab_part(config.vocab_size)
        tensor = torch.empty(num_rows, hidden, dtype=dtype, device=device)
        tensor[len(tokens) :].zero_()
        places[name] = _Place(tensor[: len(tokens)], (config.vocab_size, hidden), (tokens, range(hidden)))
        return tensor

    def projection(prefix: str, parts: _Parts, num_columns: int, columns: range) -> AnyWeight:
        shape = (sum(len(rows) for _, _, rows in parts), len(columns))
        outlines = [kept[name] for part, _, _ in parts if (name := f"{prefix}{part}.weight") in kept]
        matrix: AnyWeight | None = StoredWeight.joined(outlines, device) if len(outlines) == len(parts) else None
        if matrix is not None:
            pass
        elif rounding is None:
            matrix = torch.empty(shape, dtype=dtype, device=device)
        elif matrix is None:
            matrix = RoundedWeight.empty(shape, rounding, dtype, device)
        start = 0
        for name, size, rows in parts:
            target = matrix[start : start + len(rows)]
            places[f"{prefix}{name}.weight"] = _Place(target, (size, num_columns), (rows, columns))
            start += len(rows)
        return matrix

    def packed_bias(prefix: str, parts: _Parts) -> torch.Tensor:
        tensor = torch.empty(sum(len(rows) for _, _, rows in parts), dtype=dtype, device=device)
        start = 0
        for name, size, rows in parts:
            places[f"{prefix}{name}.bias"] = _Place(tensor[start : start + len(rows)], (size,), (rows,))
            start += len(rows)
        return tensor

    def summed_bias(name: str) -> torch.Tensor | None:
        if cut.rank == 0:
            return parameter(name, hidden)
        places[name] = None
        return None

    hidden, mid, size = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows = _elements(cut.heads(config.num_q_heads), size)
    kv_rows = _elements(cut.heads(config.num_kv_heads), size)
    middle, all_hidden = cut.columns(mid), range(hidden)
    qkv_parts = (
        ("q_proj", config.q_size, q_rows),
        ("k_proj", config.kv_size, kv_rows),
        ("v_proj", config.kv_size, kv_rows),
    )
    gate_up_parts = (("gate_proj", mid, middle), ("up_proj", mid, middle))
    layers: list[LayerWeights] = []
    for index in range(config.num_layers):
        layer, attention, mlp = (
            f"model.layers.{index}.",
            f"model.layers.{index}.self_attn.",
            f"model.layers.{index}.mlp.",
        )
        layers.append(
            LayerWeights(
                input_norm=parameter(f"{layer}input_layernorm.weight", hidden),
                qkv=projection(attention, qkv_parts, hidden, all_hidden),
                qkv_bias=packed_bias(attention, qkv_parts) if config.has_qkv_bias else None,
                q_norm=parameter(f"{attention}q_norm.weight", size) if config.has_qk_norm else None,
                k_norm=parameter(f"{attention}k_norm.weight", size) if config.has_qk_norm else None,
                o=projection(attention, (("o_proj", hidden, all_hidden),), config.q_size, q_rows),
                o_bias=summed_bias(f"{attention}o_proj.bias") if config.has_o_bias else None,
                post_norm=parameter(f"{layer}post_attention_layernorm.weight", hidden),
                gate_up=projection(mlp, gate_up_parts, hidden, all_hidden),
                gate_up_bias=packed_bias(mlp, gate_up_parts) if config.has_mlp_bias else None,
                down=projection(mlp, (("down_proj", hidden, all_hidden),), mid, middle),
                down_bias=summed_bias(f"{mlp}down_proj.bias") if config.has_mlp_bias else None,
            )
        )
    embed = of_vocab("model.embed_tokens.weight")
    norm = parameter("model.norm.weight", hidden)
    lm_head = embed if config.has_tied_embeddings else of_vocab("lm_head.weight")
    return ModelWeights(embed, layers, norm, lm_head), places


def _elements(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
