"""fp8 checkpoints that also round activations: their logits, the name of their K/V, and where they are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

from kvrelay.common.errors import ModelError
from kvrelay.engine import torch_engine
from kvrelay.engine.backends.cuda.build import require_fp8_products
from kvrelay.engine.backends.cuda.linear import Fp8Linear, can_multiply
from kvrelay.engine.backends.cuda.ops import CudaOps
from kvrelay.engine.backends.options import EngineOptions, activations_of
from kvrelay.engine.config.activations import Activations, load_activations
from kvrelay.engine.config.model import load_config
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.weights.checkpoint import load_weights
from kvrelay.engine.weights.parameters import ModelWeights
from kvrelay.engine.weights.stored import RoundedInputs, StoredWeight
from tests.engine.conftest import SIZES, save_model, sequence, tokens
from tests.engine.led import batch_of
from tests.engine.weights.stored_models import save_mixtral
from tests.engine.weights.storing import Tensors, store
from tests.triton_interpreter import mend_loops, mend_numbers

HALF = torch.float16
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PROMPT = tokens(1, 9)
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
TOKEN = {**FP8, "strategy": "token", "dynamic": True}
Round = Callable[[torch.Tensor, str], torch.Tensor]


def by_channel(weight: torch.Tensor, _: float) -> Tensors:
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def by_blocks(weight: torch.Tensor, _: float) -> Tensors:
    """Blocks of 32 by 32."""
    blocks = weight.view(weight.shape[0] // 32, 32, weight.shape[1] // 32, 32)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    values = (blocks / scale[:, None, :, None]).view(weight.shape)
    return {"weight": values.to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def by_tensor(weight: torch.Tensor, input_scale: float) -> Tensors:
    scale = weight.abs().max() / 448
    given = {"weight_scale": scale, "input_scale": torch.tensor(input_scale)}
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), **given}


FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor, float], Tensors]]] = {
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {**FP8, "strategy": "channel"}, "input_activations": TOKEN}},
        },
        by_channel,
    ),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, by_blocks),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, by_tensor),
}
# Input scales of modelopt's modules. q, k and v share their rows' scale, as do gate and up.
INPUT_SCALES = {
    "q_proj": 0.004,
    "k_proj": 0.006,
    "v_proj": 0.005,
    "o_proj": 0.002,
    "gate_proj": 0.005,
    "up_proj": 0.006,
}
SHARED = {**dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0.006), "o_proj": 0.002}


@pytest.fixture(scope="module", autouse=True)
def faithful_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        mend_loops(patch)
        mend_numbers(patch)
        yield


def save_llama(directory: Path, num_layers: int) -> Path:
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "initializer_range": 0.05}
    save_model(directory, transformers.LlamaConfig(**{**sizes, "num_hidden_layers": num_layers}))
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), 2)


def role_of(module: str) -> str:
    return module.rpartition(".")[2]


def stored(source: Path, target: Path, name: str) -> Path:
    """Save the model in a format, with one projection in full."""
    quantization, make = FORMATS[name]

    def of(module: str, weight: torch.Tensor) -> Tensors | None:
        is_stored = module.endswith("_proj") and not module.endswith("layers.1.mlp.down_proj")
        return make(weight, INPUT_SCALES.get(role_of(module), 0.003)) if is_stored else None

    return store(source, target, quantization, of)


def load(directory: Path, activations: Activations | None) -> ModelWeights:
    keep = partial(can_multiply, has_e4m3=True)
    return load_weights(
        directory, load_config(directory), HALF, CPU, lambda *_: None, keeps=keep, activations=activations
    )


@torch.inference_mode()
def logits(directory: Path, weights: ModelWeights) -> torch.Tensor:
    """The logits after the prompt, by the GPU's operations: all tokens but the last in one step, then the last one."""
    config = load_config(directory)
    pool = torch.zeros((24, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim), dtype=HALF)
    ops = CudaOps(config, pool, 384, 4)
    model = DecoderModel(config, weights, ops)
    row = sequence(PROMPT, [0])
    for num_tokens in (len(PROMPT) - 1, 1):
        batch = batch_of([StepRow(row, num_tokens)], 16)
        hidden = model.forward(ops.upload((batch.token_ids,))[0], ops.begin_step(batch))
        row.num_computed_tokens += num_tokens
    assert hidden is not None
    return model.logits(hidden)[-1].float()


def by_library(**scheme: Any) -> Round:
    """Round activations as compressed-tensors does."""
    arguments = QuantizationArgs(**{**FP8, "dynamic": True, **scheme})

    def rounded(hidden: torch.Tensor, _: str) -> torch.Tensor:
        scale, zero = compute_dynamic_scales_and_zp(hidden, arguments, torch.nn.Module())
        return fake_quantize(hidden, scale, zero, arguments)

    return rounded


def by_given_scale(hidden: torch.Tensor, module: str) -> torch.Tensor:
    scale = SHARED.get(role_of(module), 0.003)
    return (hidden / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


ROUNDS: dict[str, Round] = {
    "compressed-tensors": by_library(strategy="token"),
    "fp8-blocks": by_library(strategy="group", group_size=32),
    "modelopt": by_given_scale,
}


class Product(torch.nn.Module):
    """A float32 product of inputs and weights in the model's type."""

    def __init__(self, name: str, weight: torch.Tensor, rounded: Round | None) -> None:
        super().__init__()
        self.name, self.full, self.rounded = name, weight, rounded

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float() if self.rounded is None else self.rounded(hidden.float(), self.name)
        return (wide @ self.full.T).to(hidden.dtype)


@torch.inference_mode()
def reference(source: Path, directory: Path, rounded: Round | None) -> torch.Tensor:
    """transformers' logits with weights dequantised by torch, and with rounded inputs of the products."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    _, make = FORMATS[directory.name]
    for name, linear in list(model.named_modules()):
        if not name.endswith("_proj") or name.endswith("layers.1.mlp.down_proj"):
            continue
        made = make(linear.weight.data, 1.0)
        scale = made.get("weight_scale", made.get("weight_scale_inv"))
        assert scale is not None
        if "weight_scale_inv" in made:
            scale = scale.repeat_interleave(32, dim=0).repeat_interleave(32, dim=1)
        model.set_submodule(name, Product(name, made["weight"].float() * scale, rounded))
    model.to(HALF)  # all but the products' weights above
    found: torch.Tensor = model(torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
    return found.float()


@pytest.mark.skipif(torch.cuda.is_available(), reason="weights on a CPU, and kernels in the interpreter")
@pytest.mark.parametrize(
    "name",
    ["compressed-tensors", *(pytest.param(one, marks=pytest.mark.full) for one in ("fp8-blocks", "modelopt"))],
)
def test_logits_are_those_of_rounded_activations(name: str, tmp_path: Path) -> None:
    """The last token is computed in its own step, over the K/V of the prompt."""
    source = save_llama(tmp_path / "full", 1)
    directory = stored(source, tmp_path / name, name)
    ours = logits(directory, load(directory, load_activations(directory)))
    wanted, exact = (reference(source, directory, rounded) for rounded in (ROUNDS[name], None))
    of_activations = (exact - wanted).norm() / wanted.norm()
    # fp16 between products may move a few numbers to the next e4m3 value. Rounding activations changes every number.
    error = (ours - wanted).norm() / wanted.norm()
    assert error < 0.3 * of_activations, (error, of_activations)
    assert 0.01 < of_activations < 0.2


@pytest.mark.parametrize("name", FORMATS)
def test_inputs_of_all_products_that_stay_in_fp8_are_rounded(name: str, llama: Path, tmp_path: Path) -> None:
    directory = stored(llama, tmp_path, name)
    plain, rounding = load(directory, None), load(directory, load_activations(directory))
    wanted = {
        "compressed-tensors": RoundedInputs(None, None),
        "fp8-blocks": RoundedInputs(32, None),
        "modelopt": RoundedInputs(None, pytest.approx(0.006)),
    }[name]
    for one, two in zip(plain.layers, rounding.layers, strict=True):
        assert one.attention.qkv.inputs is None
        assert two.attention.qkv.inputs == two.mlp.gate_up.inputs == wanted
    assert isinstance(rounding.layers[0].mlp.down, StoredWeight)
    assert isinstance(rounding.layers[1].mlp.down, torch.Tensor)


def test_a_row_is_rounded_alike_whoever_is_computed_beside_it(llama: Path, tmp_path: Path) -> None:
    """Few rows are multiplied with splits, many without."""
    directory = stored(llama, tmp_path, "compressed-tensors")
    weight = load(directory, Activations()).layers[0].attention.qkv
    assert isinstance(weight, StoredWeight)
    hidden = torch.randn(20, 64, generator=torch.Generator().manual_seed(3)).to(HALF)
    linear = Fp8Linear(weight, None, num_multiprocessors=16)
    few = torch.cat([linear(hidden[start : start + 1]) for start in range(20)])
    torch.testing.assert_close(linear(hidden), few, rtol=2**-10, atol=1e-3)


def test_a_scale_that_is_missing_or_wrong_is_refused(llama: Path, tmp_path: Path) -> None:
    quantization, _ = FORMATS["modelopt"]
    for value in (None, 0.0, [1.0, 2.0]):

        def of(module: str, weight: torch.Tensor, value: Any = value) -> Tensors | None:
            if not module.endswith("_proj"):
                return None
            made = by_tensor(weight, 1.0)
            del made["input_scale"]
            return made if value is None else {**made, "input_scale": torch.tensor(value)}

        directory = store(llama, tmp_path / str(value), quantization, of)
        load(directory, None)
        with pytest.raises(ModelError, match=r"model\.safetensors: .*_proj\.weight needs an input_scale, one number"):
            load(directory, load_activations(directory))


def test_workers_with_and_without_exchange_no_kv(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = stored(llama, tmp_path, "compressed-tensors")
    options = EngineOptions(directory, "tiny", dtype="float32", device="cpu", num_blocks=8)
    plain = torch_engine.TorchEngine.load(options, lambda *_: None).card
    monkeypatch.setattr(torch_engine, "activations_of", lambda *_: Activations())
    rounding = torch_engine.TorchEngine.load(options, lambda *_: None).card
    assert plain.layout.fingerprint() != rounding.layout.fingerprint()
    assert rounding.layout.weights_digest == f"{plain.layout.weights_digest}-fp8-activations"


def test_what_has_no_such_products_is_refused(llama: Path, tmp_path: Path) -> None:
    directory = stored(llama, tmp_path / "fp8", "compressed-tensors")
    config = load_config(directory)
    options = EngineOptions(directory, "tiny", fp8_activations=True)
    assert activations_of(options, config, CUDA, torch.bfloat16) == Activations()
    assert activations_of(replace(options, fp8_activations=False), config, CPU, torch.float32) is None
    with pytest.raises(ModelError, match=r"--fp8-activations is on, which needs a GPU .* not cpu; leave it out"):
        activations_of(options, config, CPU, torch.bfloat16)
    with pytest.raises(ModelError, match=r"which needs --dtype bfloat16 or float16, not torch\.float32"):
        activations_of(options, config, CUDA, torch.float32)
    with pytest.raises(ModelError, match="and --weight-format is int8; weights are multiplied as the checkpoint"):
        activations_of(replace(options, weight_format="int8"), config, CUDA, torch.bfloat16)
    with pytest.raises(ModelError, match="does not say how to round them to fp8: its weights are not quantised"):
        activations_of(replace(options, model_dir=llama), load_config(llama), CUDA, torch.bfloat16)
    save_mixtral(tmp_path)
    with pytest.raises(ModelError, match="MixtralForCausalLM has experts, whose products take 16 bits only"):
        activations_of(replace(options, model_dir=tmp_path), load_config(tmp_path), CUDA, torch.bfloat16)
    with pytest.raises(ModelError, match="--fp8-activations is on, which needs a GPU"):
        torch_engine.TorchEngine.load(replace(options, device="cpu"), lambda *_: None)


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 0), True), ((8, 9), False), ((10, 0), False)])
def test_a_gpu_without_fp8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    require_fp8_products(None, CUDA)
    if not is_refused:
        require_fp8_products(Activations(), CUDA)
        return
    with pytest.raises(
        ModelError, match=r"--fp8-activations is on, but products of fp8 with fp8 need .* has 8.0; leave"
    ):
        require_fp8_products(Activations(), CUDA)
