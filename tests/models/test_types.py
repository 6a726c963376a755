"""Every type of transformers that generates text, beside images or not: the tokens of its own ``generate``, or a refusal by name.

A prefill worker computes prompts of unequal length in chunks and hands them over to decode workers. These continue all
of them in one batch. One sequence is preempted, and one loses its decode worker (``services.py``). If there is a GPU,
models run there, and those of transformers on the CPU.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvrelay.common.errors import ModelError
from kvrelay.common.sampling import SampledToken
from kvrelay.engine import transformers_engine
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.outline import outline_model
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.engine.transformers_engine import load_transformers_engine

from .services import MAX_BATCHED_TOKENS, MAX_NUM_SEQS, Engines, served
from .tiny import SIZES, VOCAB, NotTinyError, generate, text_types, tiny_model
from .tiny_multimodal import text_type

pytestmark = pytest.mark.long
# One type of each kind: windows, chunks, softcaps, sinks, experts, latent attention, unequal layers, learned positions,
# parallel layers, a state, an encoder of images.
_ALIKE = "llama llama4_text gemma2 gemma4_text gpt_oss qwen3_moe deepseek_v3 mimo_v2_flash gpt2 cohere2 opt qwen3_next lfm2 gemma3"
ALIKE = frozenset(_ALIKE.split())
_NATIVE = (
    "axk1 deepseek_v2 deepseek_v3 glm4_moe glm4_moe_lite gpt_oss kimi_k25 llama mistral mistral4 mixtral qwen2 qwen3 "
    "qwen3_moe youtu"
)
# transformers picks tokens by masks, which its path cannot give
ONLY_NATIVE = frozenset({"deepseek_v32", "glm_moe_dsa"})
NATIVE = ONLY_NATIVE.union(_NATIVE.split())
PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
_SECTION = PAGE.partition("## Types that run through transformers")[2].partition("## What is refused")[0]
_LISTED = "".join(part for part in _SECTION.split("\n\n") if part.startswith("`"))
EQUAL = frozenset(re.findall(r"[a-z0-9_-]+", _LISTED)) | NATIVE - ONLY_NATIVE
_NOT_TINY = """
blenderbot blt chameleon cohere_compass cohere_compass_text cosmos3_edge dbrx deepseek_ocr2 dots3_note dots3_note_text
emu3 evolla falcon fast_vlm florence2 fun_asr_nano gemma3n gemma4_assistant gemma4_unified_assistant git glm5_next
granite4_vision idefics inkling2 inkling_mm_model janus kyutai_speech_to_text molmo2 muse_glimmer muse_spark
musicgen musicgen_melody nemo_speechlm nemotron_h_omni ovis2 perception_lm phi4_multimodal pi0 plbart pp_formulanet
prophetnet qwen2_5_omni qwen3_omni_moe qwen4_exp qwen4_exp_text reformer roc_bert t5gemma2 udop unlimited_ocr
vibevoice_asr whisper xlnet zaya
"""
NOT_TINY = frozenset(_NOT_TINY.split())

# Log probabilities of zamba2 differ by up to 0.03 between transformers' own passes with and without a cache.
TOLERANCES = {"zamba2": 0.04}

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE = 8 if DEVICE == "cuda" else 4  # kernels take no smaller ones
NUM_BLOCKS = 96
NUM_TOKENS = 12
NUM_SCARCE_BLOCKS = 12 if DEVICE == "cuda" else 20  # enough for all prompts, but not for all finished sequences
_GENERATOR = torch.Generator().manual_seed(2)
PROMPTS = [torch.randint(3, VOCAB, (count,), generator=_GENERATOR).tolist() for count in (9, 5, 13, 22)]


def engine_of(directory: Path, **changes: Any) -> TorchEngine:
    """An engine that runs the model through transformers."""
    return load_transformers_engine(options_of(directory, **changes), lambda done, total: None)


def again(directory: Path, **changes: Any) -> TorchEngine:
    """Another engine of a model that an engine has checked at load: without the check, which takes much of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_engine, "check_model", lambda *_: None)
        return engine_of(directory, **changes)


def options_of(directory: Path, **changes: Any) -> EngineOptions:
    """Options for a small pool in float32."""
    chosen: dict[str, Any] = {"device": DEVICE, "dtype": "float32", "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    chosen |= {"max_num_seqs": MAX_NUM_SEQS, "max_batched_tokens": MAX_BATCHED_TOKENS, "model_id": "tiny"}
    return EngineOptions(model_dir=directory, **(chosen | changes))


def saved(model_type: str, directory: Path, /, **changes: Any) -> transformers.PreTrainedModel:
    """Save a tiny model of the type. Raises NotTinyError."""
    model = tiny_model(model_type, **changes)
    model.save_pretrained(directory)
    if model_type == "kimi_k25":
        _name_as_published(directory / "model.safetensors")
    return model


def _name_as_published(path: Path) -> None:
    """Names of Kimi K2.5 as its makers give them. transformers reads these, but writes a part of them differently."""
    change = {"language_model.model.blocks.": "language_model.model.layers.", "model.mm_projector.": "mm_projector."}
    held = {}
    for name, tensor in load_file(path).items():
        prefix = next((one for one in change if name.startswith(one)), "")
        held[change.get(prefix, "") + name.removeprefix(prefix)] = tensor
    save_file(held, path, metadata={"format": "pt"})


def logprobs(token: SampledToken) -> torch.Tensor:
    """A token's log probabilities in vocabulary order."""
    dense = torch.full((VOCAB,), -math.inf)
    for token_id, value in token.top_logprobs:
        dense[token_id] = value
    return dense


def cases() -> list[Any]:
    """All types. Those outside ``ALIKE`` run in make test-all only."""
    return [name if name in ALIKE else pytest.param(name, marks=pytest.mark.full) for name in text_types()]


@pytest.mark.parametrize("model_type", cases())
@pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
async def test_a_type_generates_as_transformers_or_is_refused(model_type: str, tmp_path: Path) -> None:
    try:
        model = saved(model_type, tmp_path)
    except NotTinyError:
        assert model_type in NOT_TINY
        return
    if model_type not in EQUAL:
        with pytest.raises(ModelError, match=r"not served|served yet|cannot be loaded|is not complete, or of another"):
            engine_of(tmp_path)
        return
    try:
        prefill = engine_of(tmp_path)
    except ModelError as error:
        if "'_Cache' object has no attribute 'layers'" in str(error):
            pytest.skip("transformers before 5.21 has another cache of states")
        raise
    engines = Engines(prefill, again(tmp_path), again(tmp_path, num_blocks=NUM_SCARCE_BLOCKS))
    outline = outline_model(tmp_path, "transformers", BLOCK_SIZE)
    assert outline.geometry == engines.prefill.card.layout.geometry
    if text_type(model_type) == model_type:
        assert outline.num_parameters == model.num_parameters()
    else:
        of_text = {*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()}
        num_parameters = sum(one.numel() for one in of_text)
        # LLaVA keeps a vector that ends an image's row.
        assert num_parameters <= outline.num_parameters <= num_parameters + SIZES["hidden_size"]
    await assert_equal(engines, model)


@pytest.mark.parametrize("model_type", sorted(NATIVE.intersection(text_types())))
async def test_a_type_with_a_path_of_ours_generates_as_transformers(model_type: str, tmp_path: Path) -> None:
    model = saved(model_type, tmp_path)
    numbers = (NUM_BLOCKS, NUM_BLOCKS, NUM_SCARCE_BLOCKS)
    engines = Engines(
        *(TorchEngine.load(options_of(tmp_path, num_blocks=number), lambda *_: None) for number in numbers)
    )
    outline = outline_model(tmp_path, "native", BLOCK_SIZE)
    assert outline.geometry == engines.prefill.card.layout.geometry
    towers = ("model.vision_tower.", "model.mm_projector.")
    assert outline.num_parameters == sum(
        tensor.numel() for name, tensor in model.state_dict().items() if not name.startswith(towers)
    )
    await assert_equal(engines, model)


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
@pytest.mark.filterwarnings("ignore")
async def test_layers_that_share_keys_and_values_have_none_of_their_own(model_type: str, tmp_path: Path) -> None:
    model = saved(model_type, tmp_path, num_kv_shared_layers=2)
    engines = Engines(engine_of(tmp_path), again(tmp_path), again(tmp_path, num_blocks=NUM_SCARCE_BLOCKS))
    geometry = engines.prefill.card.layout.geometry
    assert sum(len(group.layers) for group in geometry.groups) == 2
    assert outline_model(tmp_path, "transformers", BLOCK_SIZE).geometry == geometry
    await assert_equal(engines, model)


async def assert_equal(engines: Engines, model: transformers.PreTrainedModel) -> None:
    """Check that the services' tokens and log probabilities equal those of ``generate``."""
    outputs = await served(engines, PROMPTS, NUM_TOKENS, VOCAB)
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        expected, expected_logprobs = generate(model, prompt, NUM_TOKENS)
        assert [token.token_id for token in tokens] == expected
        bound = TOLERANCES.get(model.config.model_type, 2e-4)
        torch.testing.assert_close(torch.stack(list(map(logprobs, tokens))), expected_logprobs, atol=bound, rtol=bound)
