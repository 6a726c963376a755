"""Loads weights from safetensors files into packed parameters, one tensor at a time.

Parameters are allocated once, on the model's device, in the form that the model computes with (q, k and v in one matrix, gate and
up in one). If a model is cut among ranks (:mod:`kvrelay.engine.config.cut`), only the rank's part of each tensor is read.

On a CPU every checkpoint tensor is copied from the memory-mapped file to its place, so no weight is in memory twice. For a GPU it
is copied to the device, where it is converted and copied to its place. Beside the parameters the device holds one tensor at a time
in the file's format, and the host two pieces of 32 MiB (:mod:`kvrelay.engine.weights.upload`).
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
from kvrelay.engine.config.families import FAMILIES
from kvrelay.engine.config.model import ModelConfig
from kvrelay.engine.config.quantisation import load_quantisation
from kvrelay.engine.config.tokenizer import check_tokenizer
from kvrelay.engine.weights.headers import check_full, check_layers, checkpoint_files, read_headers
from kvrelay.engine.weights.kv_scales import is_attention_scale
from kvrelay.engine.weights.parameters import ModelWeights
from kvrelay.engine.weights.places import VocabNames, allocate, text_prefix, vocab_names
from kvrelay.engine.weights.reader import CheckpointReader
from kvrelay.engine.weights.rounding import Rounding
from kvrelay.engine.weights.stored import StoredWeight
from kvrelay.engine.weights.targets import NOTHING_KEPT, Kept, Place
from kvrelay.engine.weights.upload import TensorUpload

Progress = Callable[[int, int], None]
_SAMPLE_NBYTES = 4096  # bytes of a sample for the digest
_NUM_COMPARED = 2**24  # elements of a head and an embedding that are compared at a time
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
    """Load a checkpoint onto ``device``. ``progress`` is called with (bytes done, bytes in all).

    ``config``: of the whole model. ``cut``: the part to load.
    ``rounding``: of the layers' projections; None for none. Each tensor is rounded when it is read, so there are never full copies
    of all. Rounding works on whole rows: a rank with some columns of a matrix reads all of them.
    ``keeps``: which stored forms of a quantised checkpoint's projections stay stored, if they are not rounded; the others become
    full.
    ``activations``: how inputs of stored e4m3 weights are rounded; None: not at all.

    At any time the device holds at most the parameters, the largest tensor in the file's dtype (a quantised one also in full), and
    fp32 copies for rounding 2**24 elements (about 130 MiB). torch may cache freed memory. Raises ModelError as
    :func:`check_checkpoint` does, before any memory is taken, and if the GPU is too small for the model.
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
    num_parts = cut.num_ranks * cut.num_stages
    total = sum(path.stat().st_size for path in checkpoint_files(directory)) // num_parts
    quantisation = load_quantisation(directory)
    upload = TensorUpload(device) if device.type == "cuda" else None
    with CheckpointReader(read_headers(directory), quantisation, dtype, activations, upload) as reader:
        check_checkpoint(directory, reader, config)
        num_bytes_checked = reader.num_bytes_read
        kept = NOTHING_KEPT if keeps is None or rounding is not None else Kept(reader.outlines, keeps)
        weights, places = allocate(config, dtype, device, rounding, cut, kept)
        for name in reader.headers:
            place = places.get(name)
            if place is None:
                continue  # the model does not need it, or another rank has it
            for piece, part in enumerate(place.pieces):
                if place.is_stored:
                    place.put_stored(reader.stored(name, part), piece)
                else:
                    place.put(reader.part(name, part), piece)
            progress(min(reader.num_bytes_read - num_bytes_checked, total), total)
    progress(total, total)
    return weights


def load_embedding(directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The whole embedding of a checkpoint that ``load_weights`` has loaded, ``[vocab, hidden]``, in new memory."""
    with CheckpointReader(read_headers(directory), load_quantisation(directory), dtype) as reader:
        return reader.read(vocab_names(config).embedding).to(device, dtype, copy=True)


def check_checkpoint(directory: Path, reader: CheckpointReader, config: ModelConfig) -> None:
    """Check by the files' headers that the tensors of the checkpoint in ``directory`` are those that ``config`` needs.

    Reads no tensor but biases that the model does not have, and a tied head with its embedding.
    Raises ModelError naming file and tensor if one is missing, unknown, of another shape, or in a quantised format that the config
    does not describe, or if a tied head differs from the embedding.
    """
    headers = reader.headers
    check_layers(directory, config.num_layers, headers)
    places, names = checkpoint_places(config), vocab_names(config)
    if missing := sorted(name for name, place in places.items() if name not in headers and not place.is_optional):
        files = checkpoint_files(directory)
        where = str(files[0]) if len(files) == 1 else f"the {len(files)} files in {directory}"
        is_draft = config.has_draft_layer and all(map(_is_of_draft_layer(config), missing))
        way_out = (
            "; only --speculation mtp needs them: take --speculation ngram, draft-model or head" if is_draft else ""
        )
        raise ModelError(f"{len(missing)} tensors are missing from {where}, the first is {missing[0]}{way_out}")
    for name, header in headers.items():
        if (place := places.get(name)) is None:
            _check_unused(reader, name, config)
        elif header.shape != place.shape:
            raise ModelError(
                f"{header.path}: tensor {name} has shape {list(header.shape)}; config.json asks for {list(place.shape)}"
            )
    used = places.keys() | {names.head}  # a tied one is compared
    check_full({name: header for name, header in headers.items() if name in used})
    if names.head in headers and names.head not in places and _has_own_head(reader, names):
        raise ModelError(
            f"{headers[names.head].path}: tensor {names.head} differs from {names.embedding}, which config.json asks for in its "
            "place: set tie_word_embeddings to false in config.json"
        )


def check_files(directory: Path, config: ModelConfig) -> None:
    """Like :func:`check_checkpoint` for a checkpoint that is not loaded yet; also checks its tokenizer."""
    check_tokenizer(directory, config.vocab_size)
    with CheckpointReader(read_headers(directory), load_quantisation(directory), torch.float32) as reader:
        check_checkpoint(directory, reader, config)


def checkpoint_places(config: ModelConfig, cut: Cut = _WHOLE) -> dict[str, Place]:
    """The tensors of which a rank has a part, by name, and which part. Allocates no memory for them."""
    _, places = allocate(config, torch.float32, torch.device("meta"), None, cut, NOTHING_KEPT)
    return {name: place for name, place in places.items() if place is not None}


def weights_digest(directory: Path) -> str:
    """A digest that distinguishes checkpoints without reading all of them.

    It covers config.json (without the version that wrote it), every file's size and safetensors header (names, shapes, types), the
    first 4 KiB of every tensor, and 64 samples of 4 KiB spread over each file. Two checkpoints of one shape that differ in a few
    single weights could have the same digest. A fine-tune (even of norms alone), another quantization or another training step has
    another one. The files must be complete, as they are after loading.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config.pop("transformers_version", None)  # two workers may have converted one model with different releases
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
    """Raise ModelError for a tensor that we cannot use, unless the model is the same without it."""
    family = FAMILIES[config.architecture]
    is_tied_head = name == vocab_names(config).head and config.has_tied_embeddings
    is_rotary_buffer = name.endswith(".rotary_emb.inv_freq")  # in old checkpoints; the config determines it
    is_draft = _is_of_draft_layer(config)(name)
    is_of_tower = family.text is not None and name.startswith(family.text.towers)
    norm = None if family.experts is None else family.experts.norm
    is_unused_norm = norm is not None and name.endswith(f".{norm}.weight")  # of a layer without experts
    if is_tied_head or is_rotary_buffer or is_draft or is_of_tower or is_unused_norm or is_attention_scale(name):
        return
    if reader.is_zero_bias(name):
        return
    raise ModelError(
        f"{reader.headers[name].path}: tensor {name} is unknown to {config.architecture} with this config.json; it would be ignored"
    )


def _is_of_draft_layer(config: ModelConfig) -> Callable[[str], bool]:
    """Tells whether a tensor of this name belongs to a layer for drafting."""
    drafts = range(config.num_layers, config.num_layers + config.num_draft_layers)
    prefixes = tuple(f"{text_prefix(config)}model.layers.{layer}." for layer in drafts)
    return lambda name: name.startswith(prefixes)


def _has_own_head(reader: CheckpointReader, names: VocabNames) -> bool:
    """Whether the head in the checkpoint of a model with tied embeddings differs from the embedding. Reads pieces of both.

    transformers ties equal tensors only. A difference by rounding does not count: between two types of floats, or of a quantised
    tensor, which is not read.
    """
    if not reader.outlines.keys().isdisjoint(names):
        return False
    shape = reader.headers[names.embedding].shape
    if reader.headers[names.head].shape != shape:
        return True
    num_rows, num_columns = shape
    step = max(1, _NUM_COMPARED // num_columns)
    for start in range(0, num_rows, step):
        part = range(start, min(start + step, num_rows)), range(num_columns)
        head, embedding = reader.part(names.head, part), reader.part(names.embedding, part)
        narrower = min(head.dtype, embedding.dtype, key=lambda dtype: dtype.itemsize)
        if not torch.equal(head.to(narrower), embedding.to(narrower)):
            return True
    return False
