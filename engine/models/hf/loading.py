"""Loads checkpoints into models of transformers. No code of a checkpoint runs, and its files are checked before memory is taken."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.model import read_config
from kvrelay.engine.config.quantisation import Quantisation, load_quantisation
from kvrelay.engine.config.tokenizer import check_tokenizer
from kvrelay.engine.models.hf.entries import require_dtype, require_experts
from kvrelay.engine.models.hf.expert_parts import NO_EXPERTS, ExpertParts, of_single_experts, put_expert_parts
from kvrelay.engine.models.hf.filling import Keep, filled
from kvrelay.engine.models.hf.gate import probe_layers
from kvrelay.engine.models.hf.kept import NO_PARAMETERS, KeptParameters, PartOf, find_kept, put_kept
from kvrelay.engine.models.hf.model import PLAIN_ATTENTION, TransformersModel, shape_of
from kvrelay.engine.models.hf.origins import Traced
from kvrelay.engine.models.hf.outline import NoWeights
from kvrelay.engine.models.hf.parts import candidates
from kvrelay.engine.models.hf.progress import followed, without_bar
from kvrelay.engine.models.hf.text import full_class, text_class, towers_of
from kvrelay.engine.weights.headers import (
    check_experts,
    check_full,
    check_layers,
    checkpoint_files,
    read_headers,
)
from kvrelay.engine.weights.kv_scales import is_attention_scale
from kvrelay.engine.weights.reader import CheckpointReader
from kvrelay.engine.weights.stored import StoredWeight
from kvrelay.engine.weights.upload import TensorUpload

Fill = Callable[[type[PreTrainedModel]], AbstractContextManager[type[PreTrainedModel]]]
"""A class of models -> a context with the class to load instead, see ``filled``"""
_TYPES_BY_OTHER_NAMES = {"kimi_k2": "deepseek_v3"}  # transformers' name of the same type
_MOST_MODULES = 2**16  # of layers, heads, experts: no model comes close, and making more would take forever
_LOADING_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError, StrictDataclassError)


def load_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda *_: None,
    *,
    with_towers: bool = False,
    keeps: Callable[[StoredWeight], bool] | None = None,
) -> TransformersModel:
    """Load the checkpoint in ``directory`` to ``device``, and find out what it asks of attention.

    Weights go through the host's memory one by one. No code of the checkpoint runs. Whatever can be checked without memory for
    weights is checked first. ``progress`` hears (bytes loaded, bytes in all). ``with_towers``: of a multimodal type, also what
    reads images. ``keeps``: which stored forms of a quantised checkpoint stay stored where our products read them; None: all become
    full.

    Raises ModelError naming what is not supported.
    """
    outline = _checked(directory, dtype, with_towers, traces=keeps is not None)
    kept = find_stored(directory, outline, dtype, keeps)
    del outline
    return _probed(load_parameters(directory, dtype, device, progress, kept=kept, with_towers=with_towers), dtype)


def load_first_layers(
    directory: Path, dtype: torch.dtype, path: str, count: int, *, with_towers: bool = False
) -> TransformersModel:
    """The model in the host's memory, with only the first ``count`` layers of the list at ``path``. Check the files before.

    Nothing else changes: a layer is what it is in the whole model. Other layers' tensors are not read.
    """
    cpu = torch.device("cpu")
    return _probed(load_parameters(directory, dtype, cpu, with_towers=with_towers, first=(path, count)), dtype, count)


def load_outline(
    directory: Path,
    dtype: torch.dtype,
    *,
    with_towers: bool = False,
    traces: bool = False,
    traces_experts: bool = False,
) -> TransformersModel:
    """The model with parameters that take no memory (``outline.py``). Checks the files. ``traces``: for :func:`find_stored`.
    ``traces_experts``: for ``find_expert_parts``.

    Raises ModelError like ``load_model``.
    """
    model = _checked(directory, dtype, with_towers, traces=traces, traces_experts=traces_experts).eval()
    model.set_experts_implementation("eager")
    with NoWeights():
        return _probed(model, dtype)


def load_parameters(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda *_: None,
    keep: Keep | None = None,
    *,
    kept: KeptParameters = NO_PARAMETERS,
    experts: ExpertParts = NO_EXPERTS,
    with_towers: bool = False,
    first: tuple[str, int] | None = None,
) -> PreTrainedModel:
    """The model as transformers loads it, parameter by parameter. ``kept``: parameters that stay stored.

    ``experts``: those of which only a part is read. ``keep``, ``first``: see ``filled``. Check the files before.
    """
    num_bytes = sum(path.stat().st_size for path in checkpoint_files(directory))
    of_experts = round(experts.share * num_bytes)
    num_full_bytes = max(0, num_bytes - kept.nbytes - of_experts)
    with followed(lambda done, _: progress(done, num_bytes), num_full_bytes):
        fill = partial(filled, device=device, keep=keep, first=first)
        traced = kept.sources | experts.sources
        model = _from_pretrained(directory, dtype, None, with_towers, fill, traced).eval()
    require_experts(directory, model)
    if traced:
        upload = TensorUpload(device) if device.type == "cuda" else None

        def tell(done: float) -> None:
            progress(min(num_full_bytes + int(done), num_bytes), num_bytes)

        with CheckpointReader(read_headers(directory), load_quantisation(directory), dtype, upload=upload) as reader:
            put_expert_parts(model, experts, reader, device, lambda share: tell(share * of_experts))
            before = reader.num_bytes_read
            put_kept(model, kept, reader, device, lambda done: tell(of_experts + done - before))
    model = model.to(device)
    progress(num_bytes, num_bytes)
    if with_towers:
        for parent, name, _ in towers_of(model):
            _make_fast(getattr(parent, name))
    return model


def _probed(model: PreTrainedModel, dtype: torch.dtype, num_layers: int | None = None) -> TransformersModel:
    layers = probe_layers(model, num_layers)
    made = TransformersModel(model, layers, shape_of(model, layers, dtype))
    made.use_our_attention()
    return made


def _make_fast(tower: nn.Module) -> None:
    """Let a tower compute attention without a matrix of all scores, which large images have no memory for."""
    if isinstance(tower, PreTrainedModel):
        with contextlib.suppress(ValueError):  # it has its own attention
            tower.set_attn_implementation("sdpa")


def check_files(directory: Path, dtype: torch.dtype, *, with_towers: bool = False) -> None:
    """Check that the checkpoint's files belong to the model. Takes no memory for weights. Raises ModelError."""
    _checked(directory, dtype, with_towers)


def _checked(
    directory: Path, dtype: torch.dtype, with_towers: bool, *, traces: bool = False, traces_experts: bool = False
) -> PreTrainedModel:
    """The model on "meta", once its files are checked. ``traces``: stored weights know their origins, ``traces_experts``: those of
    single experts do.
    """
    headers = read_headers(directory)
    config = load_transformers_config(directory).get_text_config()
    require_dtype(config, dtype)
    check_layers(directory, int(config.num_hidden_layers), headers)
    with CheckpointReader(headers, load_quantisation(directory), dtype) as reader:
        check_full(reader.headers)
        traced = frozenset(reader.outlines) if traces else frozenset()
        traced |= of_single_experts(reader) if traces_experts else frozenset()
    check_tokenizer(directory, int(config.vocab_size))
    try:
        return _from_pretrained(directory, dtype, "meta", with_towers, traced=traced)
    except ModelError:
        check_experts(directory, reader.headers)  # names more than transformers does
        raise


def find_stored(
    directory: Path,
    outline: PreTrainedModel,
    dtype: torch.dtype,
    keeps: Callable[[StoredWeight], bool] | None,
    part_of: PartOf = lambda _, origin: origin,
) -> KeptParameters:
    """The parameters that stay stored. ``outline``: on "meta", traced. ``keeps``: see ``load_model``. ``part_of``: see
    ``find_kept``.
    """
    quantisation = load_quantisation(directory)
    if keeps is None or quantisation is None:
        return NO_PARAMETERS
    with CheckpointReader(read_headers(directory), quantisation, dtype) as reader:
        return find_kept(outline, candidates(outline), reader, dtype, keeps, part_of)


def load_transformers_config(directory: Path) -> PreTrainedConfig:
    """``config.json`` as transformers reads it. Raises ModelError on an unknown type, or absurd counts."""
    try:
        content = read_config(directory)
        if (model_type := _TYPES_BY_OTHER_NAMES.get(str(content.get("model_type")))) is not None:
            config = transformers.CONFIG_MAPPING[model_type].from_dict({**content, "model_type": model_type})
        else:
            config = transformers.AutoConfig.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
    except _LOADING_ERRORS as error:
        raise _not_loaded(directory, error) from error
    for name, value in config.get_text_config().to_dict().items():
        if name.startswith(("num_", "n_routed_")) and isinstance(value, int) and value > _MOST_MODULES:
            raise ModelError(f"{directory}: {name!r} is {value} in config.json; at most {_MOST_MODULES} is possible")
    return config


def load_full_config(directory: Path) -> PreTrainedConfig:
    """Like :func:`load_transformers_config`; for a quantised checkpoint the config of the full model."""
    config = load_transformers_config(directory)
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config  # otherwise transformers would require its own library for the format
    return config


def _class_of(config: PreTrainedConfig, with_towers: bool) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class for a checkpoint, and the part of its config that this takes."""
    return (full_class(config), config) if with_towers else text_class(config)


def _from_pretrained(
    directory: Path,
    dtype: torch.dtype,
    device_map: str | None,
    with_towers: bool,
    fill: Fill = nullcontext,
    traced: Collection[str] = (),
) -> PreTrainedModel:
    """The model. On "meta" it takes no memory, but names and shapes of tensors are still compared.

    ``traced``: weights that are not read, but traced.
    """
    how: dict[str, Any] = {
        "dtype": dtype, "attn_implementation": PLAIN_ATTENTION, "output_loading_info": True, "device_map": device_map,
        # Tensors of another shape are then reported like missing ones; the library's own error does not name them.
        "ignore_mismatched_sizes": True,
    }  # fmt: skip
    try:
        if (quantisation := load_quantisation(directory)) is None and not traced:
            model_class, config = _class_of(load_transformers_config(directory), with_towers)
            with without_bar(), fill(model_class) as made:
                model, info = made.from_pretrained(
                    str(directory), config=config, local_files_only=True, use_safetensors=True, **how
                )
        else:
            model, info = _from_reader(directory, quantisation, how, with_towers, fill, traced)
    except _LOADING_ERRORS as error:
        raise _not_loaded(directory, error) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, info[kind])):
            raise ModelError(
                f"{directory}: {len(names)} tensors are {kind.split('_')[0]} for {type(model).__name__}, {names[0]} the first: the "
                "checkpoint is not complete, or of another model"
            )
    loaded: PreTrainedModel = model
    return loaded


def _from_reader(
    directory: Path,
    quantisation: Quantisation | None,
    how: dict[str, Any],
    with_towers: bool,
    fill: Fill,
    traced: Collection[str],
) -> tuple[PreTrainedModel, Any]:
    """A full model of weights that our reader reads, also stored ones, and what transformers reports about loading."""
    model_class, config = _class_of(load_full_config(directory), with_towers)
    with CheckpointReader(read_headers(directory), quantisation, how["dtype"]) as reader:
        tensors: dict[str, Any] = {}
        for name, header in reader.headers.items():
            if is_attention_scale(name):
                continue
            if name in traced:
                tensors[name] = Traced.of(name, header.shape, how["dtype"], has_inputs_first=reader.has_inputs_first)
            elif how["device_map"] == "meta":
                tensors[name] = torch.empty(header.shape, device="meta")
            else:
                tensors[name] = _Unread(reader, name)
        with without_bar(), fill(model_class) as made:
            model, info = made.from_pretrained(None, config=config, state_dict=tensors, **how)
        info["unexpected_keys"] = [name for name in info["unexpected_keys"] if not reader.is_zero_bias(name)]
    return model, info


@dataclass(frozen=True, slots=True)
class _Unread:
    """A checkpoint's tensor in a state dictionary; transformers reads it with ``[...]`` when it needs it."""

    reader: CheckpointReader
    name: str

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self.reader.read(self.name)


def _not_loaded(directory: Path, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelError(f"{directory} cannot be loaded by transformers: {reason}")
