"""``kvrelay check-model``: its report on models with weights, without weights, and refused ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvrelay.common.errors import ModelError
from kvrelay.launcher import check_model, cli
from tests.heads import save_head
from tests.models import tiny
from tests.models.tiny_images import save_image_model
from tests.tokenizer_files import save_tokenizer

SIZES: dict[str, Any] = {**tiny.SIZES, "dtype": "float32"}

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out


def write_config(directory: Path, model_type: str, **fields: Any) -> Path:
    """Write a config.json, without weights."""
    config = transformers.CONFIG_MAPPING[model_type](**fields)
    class_name = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    (directory / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": [class_name]}))
    return directory


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON report."""
    code = cli.run(["check-model", "--json", *arguments])
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, content


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_model_with_weights_is_compared(model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, model_type, **SIZES)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    code, report = found(capsys, str(tmp_path), "--memory-gib", "1")
    assert (code, report["runs"], report["reason"]) == (0, True, None)
    assert report["path"] == ("native" if model_type == "llama" else "transformers")
    assert report["num_parameters"] == model.num_parameters()
    assert report["weights_bytes"] == 4 * model.num_parameters()
    assert report["kv_bytes_per_token"] == 4 * 2 * 2 * 16 * 4
    assert sum(group["bytes_per_token"] for group in report["kv_groups"]) == report["kv_bytes_per_token"]
    assert sum(group["num_layers"] for group in report["kv_groups"]) == 4
    gpu = report["gpu"]
    assert gpu["kv_nbytes"] == int(0.9 * 2**30) - report["weights_bytes"] - gpu["step_nbytes"]
    assert 0 <= gpu["kv_nbytes"] - gpu["num_tokens"] * report["kv_bytes_per_token"] < 16 * report["kv_bytes_per_token"]
    assert report["logits"].startswith("as transformers computes them")
    assert report["logits"].endswith("with its weights")
    assert report["lacks"].startswith("tokenizer.json: make one with")
    assert cli.run(["check-model", str(tmp_path)]) == 0
    assert "  lacks            tokenizer.json: make one" in capsys.readouterr().out
    (tmp_path / "tokenizer.json").write_text("{}")
    assert found(capsys, str(tmp_path))[1]["lacks"] is None


@pytest.mark.parametrize("model_type", ["qwen3", "cohere2"])
def test_without_weights_random_ones_are_compared(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = found(capsys, str(write_config(tmp_path, model_type, **SIZES)))
    assert (code, report["gpu"]) == (0, None)
    assert report["logits"].endswith("with random weights, as its own are not here")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_latents_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, "deepseek_v3", **SIZES | tiny.EXPERTS | tiny.LATENT)
    code, report = found(capsys, str(tmp_path))
    assert (code, report["path"], report["kv_bytes_per_token"]) == (0, "native", 4 * (16 + 8) * 4)
    (group,) = report["kv_groups"]
    assert (group["kind"], group["num_kv_heads"], group["key_size"], group["value_size"]) == ("latent", 1, 24, 0)
    assert report["logits"].startswith("as transformers computes them")


def test_of_a_type_with_images_our_forward_pass_has_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, "deepseek_v3", **SIZES | tiny.EXPERTS | tiny.LATENT)
    text = json.loads((tmp_path / "config.json").read_text())
    content = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**content, "tie_word_embeddings": False}))
    code, report = found(capsys, str(tmp_path))
    assert (code, report["path"], report["kv_bytes_per_token"]) == (0, "native", 4 * (16 + 8) * 4)
    assert report["logits"].startswith("as transformers computes them")


def test_the_keys_of_an_indexer_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, "glm_moe_dsa", **SIZES | tiny.MORE["glm_moe_dsa"])
    code, report = found(capsys, str(tmp_path))
    assert (code, report["path"], report["kv_bytes_per_token"]) == (0, "native", 4 * (16 + 8 + 16) * 4)
    assert report["logits"].startswith("as transformers computes them")


def test_quantised_weights_take_less_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, "llama", **SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    _, report = found(capsys, str(tmp_path), "--memory-gib", "1")
    projections = 4 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96)
    assert report["gpu_weights_bytes"] == int(report["weights_bytes"] - projections * (4 - 4 / 8 - 4 / 128))
    assert report["gpu"]["kv_nbytes"] == int(0.9 * 2**30) - report["gpu_weights_bytes"] - report["gpu"]["step_nbytes"]


@pytest.mark.parametrize(
    ("quantization", "bits", "has_experts"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8.25, True),
        ({"quant_method": "gptq", "bits": 4}, 4.25, True),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, 4.25, False),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "transformers"])
def test_quantised_experts_take_less_of_a_gpu(
    quantization: dict[str, Any],
    bits: float,
    has_experts: bool,
    backend: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Experts stay quantised on the GPU, unless each has its own order of inputs."""
    write_config(tmp_path, "qwen3_moe", **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    _, report = found(capsys, str(tmp_path), "--memory-gib", "1", "--backend", backend)
    assert (report["reason"], report["path"]) == (None, "native" if backend == "auto" else backend)
    stored = 4 * 64 * (64 + 32 + 32 + 64) + (4 * 4 * 3 * 64 * 32 if has_experts else 0)
    assert report["gpu_weights_bytes"] == int(report["weights_bytes"] - stored * (4 - bits / 8))


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_each_of_two_ranks_has_its_part_as_it_is_stored(
    is_shuffled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last rank has two of three parts of the MLP. Weights with reordered inputs are not cut as stored, so they are
    full."""
    write_config(tmp_path, "llama", **SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "gptq", "bits": 4, "desc_act": is_shuffled}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    code, report = found(capsys, str(tmp_path), "--memory-gib", "1", "--tensor-parallel", "2")
    assert code == 0
    by_outputs, by_inputs = 4 * 64 * (32 + 16 + 16 + 2 * 64), 4 * 64 * (32 + 64)
    full = 2 * 99 * 64 + 9 * 64 + (by_inputs if is_shuffled else 0)
    stored = by_outputs + (0 if is_shuffled else by_inputs)
    gpu = report["gpu"]
    assert (gpu["num_ranks"], gpu["weights_nbytes"]) == (2, int(4 * full + stored * 4.25 / 8))
    assert gpu["kv_nbytes"] == int(0.9 * 2**30) - gpu["weights_nbytes"] - gpu["step_nbytes"]
    of_rank = report["kv_bytes_per_token"] // 2
    assert 0 <= gpu["kv_nbytes"] - gpu["num_tokens"] * of_rank < 16 * of_rank


def test_of_two_stages_that_counts_which_has_least_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each stage has half of the layers. The last stage also has the norm, so its weights are the larger ones."""
    write_config(tmp_path, "llama", **SIZES)
    _, whole = found(capsys, str(tmp_path), "--memory-gib", "1")
    code, report = found(capsys, str(tmp_path), "--memory-gib", "1", "--pipeline-parallel", "2")
    assert code == 0
    gpu = report["gpu"]
    assert (gpu["num_ranks"], gpu["weights_nbytes"]) == (2, whole["gpu_weights_bytes"] // 2 + 4 * 64 // 2)
    assert gpu["num_tokens"] > 1.9 * whole["gpu"]["num_tokens"]


def test_what_guesses_is_on_the_first_of_two_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A draft model of half the size, and a head that lacks an embedding. The worker's pool is that of the fullest GPU."""
    for name, num_layers in (("model", 4), ("draft", 2), ("head", 0)):
        (tmp_path / name).mkdir()
        if num_layers:
            write_config(tmp_path / name, "llama", **{**SIZES, "num_hidden_layers": num_layers})
            save_tokenizer(tmp_path / name, 128, ["<eos>"], "a fox", "")
    save_head(tmp_path / "head", tmp_path / "model", num_drafted=64)
    asked = [str(tmp_path / "model"), "--memory-gib", "1", "--tensor-parallel", "2"]
    _, alone = found(capsys, *asked)
    assert alone["draft_bytes"] == 0
    for kind, name in (("draft-model", "draft"), ("head", "head")):
        code, report = found(capsys, *asked, "--speculation", kind, "--draft-model", str(tmp_path / name))
        assert code == 0
        assert report["draft_bytes"] > 2**28
        # Alone, the second GPU is the fuller one by a few rows of weights.
        num_less = alone["gpu"]["kv_nbytes"] - report["gpu"]["kv_nbytes"]
        assert 0 <= report["draft_bytes"] - num_less < 2**17
    code, report = found(
        capsys, *asked, "--pipeline-parallel", "2", "--speculation", "head", "--draft-model", str(tmp_path / "head")
    )
    assert code == 1
    assert "layers that other stages have" in report["reason"]


def test_a_layer_for_drafting_is_on_each_of_two_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each GPU has less room by its part of the layer and by the K/V for it."""
    sizes = {**tiny.SIZES, **tiny.EXPERTS, **tiny.LATENT, "dtype": "float32", "num_nextn_predict_layers": 1}
    write_config(tmp_path, "deepseek_v3", **sizes)
    asked = [str(tmp_path), "--memory-gib", "1", "--tensor-parallel", "2"]
    _, alone = found(capsys, *asked)
    code, report = found(capsys, *asked, "--speculation", "mtp")
    assert (code, report["draft_bytes"] > 2**28) == (0, True)
    more = report["gpu"]["weights_nbytes"] - alone["gpu"]["weights_nbytes"]
    layer = report["num_parameters"] - alone["num_parameters"]
    assert 2 * layer < more < 4 * layer  # norms and latents are on both
    assert alone["gpu"]["kv_nbytes"] - report["gpu"]["kv_nbytes"] == more + report["draft_bytes"]
    quantised = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    write_config(tmp_path, "deepseek_v3", **sizes, quantization_config=quantised)
    of_fp8 = [found(capsys, *asked[:3], *more)[1]["gpu_weights_bytes"] for more in ((), ("--speculation", "mtp"))]
    first_product = 2 * sizes["hidden_size"] ** 2  # stays float32
    assert of_fp8[1] - of_fp8[0] > layer + 3 * first_product
    write_config(tmp_path, "deepseek_v3", **{**sizes, "num_nextn_predict_layers": 0})
    code, report = found(capsys, *asked, "--speculation", "mtp")
    assert (code, "one layer for drafting is needed" in report["reason"]) == (1, True)


def test_more_stages_than_layers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = found(capsys, str(write_config(tmp_path, "llama", **SIZES)), "--pipeline-parallel", "9")
    assert (code, report["runs"]) == (1, False)
    assert "take at most as many stages" in report["reason"]


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_ranks_that_do_not_fit_are_refused(model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = found(capsys, str(write_config(tmp_path, model_type, **SIZES)), "--tensor-parallel", "3")
    assert (code, report["runs"]) == (1, False)
    assert "which fit 1, 2, 4 ranks" in report["reason"]


def test_of_two_ranks_of_a_type_of_transformers_each_has_half_of_its_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, "gemma2", **{**SIZES, "intermediate_size": 128})  # at multiples of 64 columns
    _, whole = found(capsys, str(tmp_path), "--memory-gib", "1")
    code, report = found(capsys, str(tmp_path), "--memory-gib", "1", "--tensor-parallel", "2")
    assert code == 0
    kept_whole, gpu = 2 * SIZES["vocab_size"] * SIZES["hidden_size"] * 4, report["gpu"]  # the embedding, and the head
    expected = (whole["gpu_weights_bytes"] + kept_whole) // 2
    assert gpu["num_ranks"] == 2
    assert expected < gpu["weights_nbytes"] < 1.02 * expected  # norms are whole, too


def test_the_rank_with_the_most_columns_is_the_one_that_must_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 6 columns the second rank has 4, as of 8."""
    of_second: list[int] = []
    for columns in (6, 8):
        write_config(tmp_path, "gemma2", **{**SIZES, "intermediate_size": columns})
        _, report = found(capsys, str(tmp_path), "--memory-gib", "1", "--tensor-parallel", "2")
        of_second.append(report["gpu"]["weights_nbytes"])
    assert of_second[0] == of_second[1]


def test_of_mxfp4_experts_alone_take_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, "gpt_oss", **SIZES, num_local_experts=4)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    _, report = found(capsys, str(tmp_path), "--memory-gib", "1")
    experts = 4 * 4 * 3 * 64 * 96
    assert report["gpu_weights_bytes"] == int(report["weights_bytes"] - experts * (4 - 4.25 / 8))


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_experts_may_have_fewer_bits_than_the_rest(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, "qwen3_moe", **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "expert_dtype": "fp4", "quantization_config": quantization})
    )
    _, report = found(capsys, str(tmp_path), "--memory-gib", "1", "--backend", backend)
    attention, experts = 4 * 64 * (64 + 32 + 32 + 64), 4 * 4 * 3 * 64 * 32
    less = attention * (4 - 8.25 / 8) + experts * (4 - 4.25 / 8)
    assert report["gpu_weights_bytes"] == int(report["weights_bytes"] - less)


def test_groups_that_are_alike_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.launcher.check_model.compare", lambda *_: 0.0)  # takes seconds
    tiny.tiny_model("deepseek_v4").config.save_pretrained(tmp_path)
    assert cli.run(["check-model", str(tmp_path)]) == 0
    lines = [line[2:19].rstrip() for line in capsys.readouterr().out.splitlines() if line.startswith("  KV group")]
    assert lines == ["KV group 0", "KV groups 1-2", "KV groups 3-4", "KV group 5", "KV groups 6-7"]


@pytest.mark.full  # takes ten seconds
def test_a_model_too_large_for_the_gpu_is_measured_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers' defaults have the sizes of DeepSeek-V3. 58 of its layers have a router bias for each of 256
    experts."""
    write_config(tmp_path, "deepseek_v3", dtype="bfloat16")
    code, report = found(capsys, str(tmp_path), "--gpu", "h100")
    assert (code, report["reason"]) == (1, "it does not fit one GPU of 79 GiB")
    assert report["num_parameters"] == 671_026_404_352 + 58 * 256
    assert report["kv_bytes_per_token"] == 61 * 576 * 2


def test_where_memory_is_short_logits_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_model, "_available_nbytes", lambda: 2**20)
    code, report = found(capsys, str(write_config(tmp_path, "gemma2", **SIZES)))
    assert code == 0
    assert report["logits"] == "not compared: that takes 0.0 GiB of memory here, and there are 0.0 GiB"


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("recurrent_gemma", {"lru_width": 64}, "keeps a state in its own way"),
        ("gptj", {"rotary_dim": 8}, "computes attention in its own way"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
    ],
)
def test_a_refusal_says_why(
    model_type: str, fields: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, model_type, **{**SIZES, "num_hidden_layers": 2, **fields})
    code, report = found(capsys, str(tmp_path))
    assert (code, report["runs"]) == (1, False)
    assert reason in report["reason"]


def test_what_does_not_know_its_own_type_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody", "architectures": ["Nobody"]}')
    code, report = found(capsys, str(tmp_path))
    assert code == 1
    assert "cannot be loaded by transformers" in report["reason"]


def test_a_broken_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{")
    code, report = found(capsys, str(tmp_path))
    assert code == 1
    assert "config.json cannot be read" in report["reason"]


def test_a_broken_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, "gemma2", **SIZES)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    code, report = found(capsys, str(tmp_path))
    assert code == 1
    assert "model.safetensors cannot be read" in report["reason"]


def test_logits_that_differ_are_a_refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_model, "compare", refuse)
    code, report = found(capsys, str(write_config(tmp_path, "granite", **SIZES)))
    assert (code, report["reason"]) == (1, "logits differ")


def refuse(*_: Any) -> float:
    """Stands for a comparison of logits that fails."""
    raise ModelError("logits differ")


def test_people_read_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, "gemma2", **SIZES)
    assert cli.run(["check-model", str(tmp_path), "--gpu", "l4"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{tmp_path} runs\n")
    assert "transformers' layers over our attention (Gemma2ForCausalLM)" in text
    assert "GPU of 22 GiB" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-model"],
        ["--gpu", "h100", "--memory-gib", "80"],
        ["--gpu", "abacus"],
        ["/nowhere/at/all"],
        ["demo", "--speculation", "head"],
        ["demo", "--speculation", "mtp", "--draft-model", "demo"],
    ],
)
def test_misuse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check-model", *arguments]) == 2
    assert capsys.readouterr().out == ""


def test_encoders_are_told_beside_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = save_image_model("llava", tmp_path)
    code, report = found(capsys, str(tmp_path))
    assert code == 0
    assert report["encoder_bytes"] > 0
    assert report["weights_bytes"] + report["encoder_bytes"] == 4 * full.num_parameters()
    assert cli.run(["check-model", str(tmp_path)]) == 0
    assert "  encoders " in capsys.readouterr().out
