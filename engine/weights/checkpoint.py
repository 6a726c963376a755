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
from collections.abc import Callable
from pathlib import Path

import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.activations import Activations
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.model import ModelConfig
from kvrelay.engine.config.quantisation import load_quantisation
from kvrelay.engine.config.tokenizer import check_tokenizer
from kvrelay.engine.weights.headers import check_full, check_layers, checkpoint_files, read_headers
from kvrelay.engine.weights.kv_scales import is_attention_scale
from kvrelay.engine.weights.parameters import ModelWeights
from kvrelay.engine.weights.places import allocate
from kvrelay.engine.weights.reader import CheckpointReader
from kvrelay.engine.weights.rounding import Rounding
from kvrelay.engine.weights.stored import StoredWeight
from kvrelay.engine.weights.targets import NOTHING_KEPT, Kept, Place

Progress = Callable[[int, int], None]
_SAMPLE_NBYTES = 4096  # of the digest
_WHOLE = Cut()


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    rounding: Rounding | None = None,
    cut: Cut = _WHOLE,
    keeps: Callable[[StoredWeight], bool] | None = None,
    activations: Activations | None = None,
) -> ModelWeights:
    """Load a checkpoint onto ``device``. ``progress`` hears (bytes done, bytes in all).

    ``config``: of the whole model. ``cut``: the part to load.
    ``rounding``: of the layers' projections, None for none; each tensor is rounded as it comes, so they are never there in full.
    By whole rows: a rank that has some columns of a matrix reads all of them.
    ``keeps``: which forms of a quantised checkpoint's projections stay as they are stored, if they are not rounded; the others
    become full. ``activations``: how inputs of those that stay in e4m3 are rounded; None: not at all.
    At most the parameters, the largest tensor that is read, in the file's dtype (a quantised one in full, too), and what rounding
    2**24 elements takes in fp32 (some 130 MiB) are on the device at a time; what torch keeps of that for later tensors is its own.
    Raises ModelError as :func:`check_checkpoint` does, before any memory is taken, and on a GPU too small for the model.
    """
    try:
        return _load(directory, config, dtype, device, progress, rounding, cut, keeps, activations)
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
    activations: Activations | None,
) -> ModelWeights:
    # With its index, which safetensors would take for 0 if it were left out.
    device_name = str(torch.empty(0, device=device).device)
    num_parts = cut.num_ranks * cut.num_stages
    total = sum(path.stat().st_size for path in checkpoint_files(directory)) // num_parts
    quantisation = load_quantisation(directory)
    with CheckpointReader(read_headers(directory), quantisation, dtype, device_name, activations) as reader:
        check_checkpoint(directory, reader, config)
        kept = NOTHING_KEPT if keeps is None or rounding is not None else Kept(reader.outlines, keeps)
        weights, places = allocate(config, dtype, device, rounding, cut, kept)
        for name in reader.headers:
            place = places.get(name)
            if place is None:
                continue  # the model is the same without it, or another rank has it
            if place.is_stored:
                place.put_stored(reader.stored(name, place.part))
            else:
                place.put(reader.part(name, place.part))
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
    return {name: place.shape for name, place in checkpoint_places(config).items()}


def checkpoint_places(config: ModelConfig, cut: Cut = _WHOLE) -> dict[str, Place]:
    """The tensors of which a rank has a part, by name, and which part. Takes no memory for them."""
    _, places = allocate(config, torch.float32, torch.device("meta"), None, cut, NOTHING_KEPT)
    return {name: place for name, place in places.items() if place is not None}


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
    drafts = range(config.num_layers, config.num_layers + config.num_draft_layers)
    is_draft = any(name.startswith(f"model.layers.{layer}.") for layer in drafts)
    if is_tied_head or is_rotary_buffer or is_draft or is_attention_scale(name) or reader.is_zero_bias(name):
        return
    raise ModelError(
        f"{reader.headers[name].path}: tensor {name} is unknown to {config.architecture} with this config.json; it would be ignored"
    )
