"""What tiny models of each type need to read images: configurations, tokens, and how images are prepared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, SamVisionConfig

from .tiny import MORE, SIZES
from .tiny_multimodal import multimodal_config, text_type

VOCAB = 320  # 256 bytes, special tokens, and some words
_TEXT_SIZES: dict[str, Any] = SIZES | {"vocab_size": VOCAB, "max_position_embeddings": 512}
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


@dataclass(frozen=True, slots=True)
class Kind:
    """What one type needs."""

    special_tokens: tuple[str, ...]  # beside the common ones; the first stands for a part of an image
    mark: str  # an image in the chat template
    config: Callable[[dict[str, int]], dict[str, Any] | PreTrainedConfig]  # from ids of special tokens
    preprocessor: dict[str, Any]
    processor: dict[str, Any]  # processor_config.json
    tokenizer: dict[str, str]  # special tokens that its processor finds by these names


def _idefics(vision_type: str) -> Callable[[dict[str, int]], dict[str, Any]]:
    return lambda ids: {
        "text_config": {"model_type": "llama", **_TEXT_SIZES},
        "vision_config": {
            "model_type": vision_type, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
        },
        "scale_factor": 2,
        "image_token_id": ids["<image>"],
        "pad_token_id": 0,
    }  # fmt: skip


def _qwen(**vision: Any) -> Callable[[dict[str, int]], dict[str, Any]]:
    return lambda ids: {
        "text_config": {**_TEXT_SIZES, "rope_parameters": _MROPE},
        "vision_config": {"depth": 2, "num_heads": 2, "patch_size": 4, **vision},
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


_IDEFICS_TOKENS = (
    "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>", "<row_1_col_2>",
    "<row_2_col_1>", "<row_2_col_2>",
)  # fmt: skip
_IDEFICS_SIZES: dict[str, Any] = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
_QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_SIZES: dict[str, Any] = {"patch_size": 4, "size": {"shortest_edge": 8 * 8, "longest_edge": 48 * 48}}

KINDS: dict[str, Kind] = {
    "smolvlm": Kind(
        *(_IDEFICS_TOKENS, "<image>", _idefics("smolvlm_vision")),
        preprocessor={"image_processor_type": "SmolVLMImageProcessor", **_IDEFICS_SIZES},
        processor={"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        tokenizer={},
    ),
    "idefics3": Kind(
        *(_IDEFICS_TOKENS, "<image>", _idefics("idefics3_vision")),
        preprocessor={"image_processor_type": "Idefics3ImageProcessor", **_IDEFICS_SIZES},
        processor={"processor_class": "Idefics3Processor", "image_seq_len": 4},
        tokenizer={},
    ),
    "qwen2_vl": Kind(
        *(_QWEN_TOKENS, _QWEN_MARK, _qwen(embed_dim=32, hidden_size=64, mlp_ratio=2)),
        preprocessor={"image_processor_type": "Qwen2VLImageProcessor", **_QWEN_SIZES},
        processor={"processor_class": "Qwen2VLProcessor"},
        tokenizer={},
    ),
    "qwen2_5_vl": Kind(
        *(_QWEN_TOKENS, _QWEN_MARK),
        _qwen(hidden_size=32, intermediate_size=48, out_hidden_size=64, window_size=16, fullatt_block_indexes=[1]),
        preprocessor={"image_processor_type": "Qwen2VLImageProcessor", **_QWEN_SIZES},
        processor={"processor_class": "Qwen2_5_VLProcessor"},
        tokenizer={},
    ),
}


def _kind(
    model_type: str,
    tokens: dict[str, str],
    preprocessor: str,
    processor: str,
    *,
    mark: str = "",
    more: tuple[str, ...] = (),
    sizes: dict[str, Any] | None = None,
    fields: dict[str, Any] | None = None,
    tokenizer: dict[str, str] | None = None,
    vision: dict[str, Any] | None = None,
    **changes: Any,
) -> Kind:
    """A type with the towers of ``tiny_multimodal``: pictures of 28 x 28 pixels, patches of 14 x 14.

    ``tokens``: by fields of the config, first that of an image's part. ``mark``: the template's, if it is another one. ``more``:
    other tokens. ``sizes``: fields of the preprocessor; ``fields``: of the processor; ``changes``: of the config;
    ``vision``: of its part for the tower.
    """

    def config(ids: dict[str, int]) -> PreTrainedConfig:
        text = MORE.get(text_type(model_type), {})
        of_layers = {"vocab_size_per_layer_input": VOCAB} if "vocab_size_per_layer_input" in text else {}
        made = multimodal_config(model_type, _TEXT_SIZES | text | of_layers)
        for name, value in {**{name: ids[token] for name, token in tokens.items()}, **changes}.items():
            setattr(made, name, value)
        for name, value in (vision or {}).items():
            setattr(made.vision_config, name, value)
        return made

    return Kind(
        (*dict.fromkeys(tokens.values()), *more),
        mark or next(iter(tokens.values())),
        config,
        {"image_processor_type": preprocessor, **(sizes or {})},
        {"processor_class": processor, **(fields or {})},
        tokenizer or {},
    )


_SQUARE: dict[str, Any] = {"size": {"height": 28, "width": 28}}
_CROP: dict[str, Any] = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
_AREA: dict[str, Any] = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}}
_CLIP: dict[str, Any] = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
_GRID = [[28, 56], [56, 28], [56, 56]]
_IMAGE = {"image_token_id": "<image>"}
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
_GLM_IDS = {
    "image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>", "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}  # fmt: skip
_GLM_AREA: dict[str, Any] = {
    "mark": "<|begin_of_image|><|image|><|end_of_image|>",
    "sizes": {"size": {"shortest_edge": 56 * 56 * 2, "longest_edge": 28 * 28 * 24}},
}
_QWEN_AREA: dict[str, Any] = {"mark": _QWEN_MARK, "sizes": _AREA}
_QWEN_IMAGES = "Qwen2VLImageProcessor"
_QWEN3: tuple[Any, ...] = (_QWEN_IDS, _QWEN_IMAGES, "Qwen3VLProcessor")
_VIDEO = {"video_token_id": "<video>"}
_GEMMA4_SIZES: dict[str, Any] = {"patch_size": 14, "max_soft_tokens": 70, "pooling_kernel_size": 3}
_GEMMA4_TOKENS = {
    "image_token": "<image>", "audio_token": "<sound>", "boi_token": "<boi>", "eoi_token": "<eoi>", "boa_token": "<boa>",
    "eoa_token": "<eoa>",
}  # fmt: skip
_OMNI = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "audio_token": "<sound>",
    "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>", "audio_bos_token": "<boa>",
    "audio_eos_token": "<eoa>",
}  # fmt: skip

KINDS |= {
    "llava": _kind("llava", _IMAGE, "LlavaImageProcessor", "LlavaProcessor", sizes=_CROP, fields=_CLIP),
    "llava_next": _kind(
        *("llava_next", _IMAGE, "LlavaNextImageProcessor", "LlavaNextProcessor"),
        sizes={**_CROP, "image_grid_pinpoints": _GRID},
        fields=_CLIP,
        image_grid_pinpoints=_GRID,
    ),
    "mistral3": _kind(
        *("mistral3", _IMAGE | {"image_token_id": "[IMG]"}, "PixtralImageProcessor", "PixtralProcessor"),
        more=("[IMG_BREAK]", "[IMG_END]"),
        sizes={"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}},
        fields={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "internvl": _kind(
        *("internvl", _IMAGE | {"image_token_id": "<IMG_CONTEXT>"}, "GotOcr2ImageProcessor", "InternVLProcessor"),
        more=("<img>", "</img>", "<video>"),
        sizes={**_SQUARE, "crop_to_patches": True, "max_patches": 4},
        fields={"image_seq_length": 1},
        tokenizer={
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "glm4v": _kind("glm4v", _GLM_IDS, "Glm4vImageProcessor", "Glm4vProcessor", **_GLM_AREA),
    "gemma3": _kind(
        *("gemma3", {"image_token_id": "<image_soft_token>"}, "Gemma3ImageProcessor", "Gemma3Processor"),
        mark="<start_of_image>",
        more=("<start_of_image>", "<end_of_image>"),
        sizes=_SQUARE,
        fields={"image_seq_length": 4},
        tokenizer={
            "image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
        },
        mm_tokens_per_image=4,
    ),
    "qwen3_vl": _kind("qwen3_vl", *_QWEN3, **_QWEN_AREA),
    "qwen3_5": _kind("qwen3_5", *_QWEN3, **_QWEN_AREA),
}  # fmt: skip

KINDS |= {
    "qwen3_vl_moe": _kind("qwen3_vl_moe", *_QWEN3, **_QWEN_AREA),
    "qwen3_5_moe": _kind("qwen3_5_moe", *_QWEN3, **_QWEN_AREA),
    "cosmos3_omni": _kind("cosmos3_omni", *_QWEN3, **_QWEN_AREA),
    "exaone4_5": _kind("exaone4_5", _QWEN_IDS, _QWEN_IMAGES, "Exaone4_5_Processor", **_QWEN_AREA),
    "hyperclovax_vision_v2": _kind(
        "hyperclovax_vision_v2", _QWEN_IDS, _QWEN_IMAGES, "HyperCLOVAXVisionV2Processor", **_QWEN_AREA
    ),
    "lfm3_vl": _kind("lfm3_vl", _QWEN_IDS, _QWEN_IMAGES, "Lfm3VlProcessor", **_QWEN_AREA),
    "qwen2_5_omni_thinker": _kind(
        *("qwen2_5_omni_thinker", _QWEN_IDS, _QWEN_IMAGES, "Qwen2_5OmniProcessor"), tokenizer=_OMNI, **_QWEN_AREA
    ),
    "qwen3_omni_moe_thinker": _kind(
        *("qwen3_omni_moe_thinker", _QWEN_IDS, _QWEN_IMAGES, "Qwen3OmniMoeProcessor"), tokenizer=_OMNI, **_QWEN_AREA
    ),
    "video_llama_3": _kind(
        *("video_llama_3", _VIDEO | {"image_token_id": "<|image_pad|>"}, "VideoLlama3ImageProcessor", "VideoLlama3Processor"),
        sizes={**_AREA, "merge_size": 1},
    ),
    "glm4v_moe": _kind("glm4v_moe", _GLM_IDS, "Glm4vImageProcessor", "Glm4vProcessor", **_GLM_AREA),
    "glm46v": _kind("glm46v", _GLM_IDS, "Glm46VImageProcessor", "Glm46VProcessor", **_GLM_AREA),
    "glm_ocr": _kind("glm_ocr", _GLM_IDS, "Glm46VImageProcessor", "Glm46VProcessor", **_GLM_AREA),
    "glmga": _kind("glmga", _GLM_IDS, "GlmgaImageProcessor", "Glm46VProcessor", **_GLM_AREA),
    "vipllava": _kind(
        *("vipllava", _IMAGE, "CLIPImageProcessor", "LlavaProcessor"),
        sizes=_CROP,
        fields=_CLIP,
        vision_feature_layers=[-1, 0],
    ),
    "llava_next_video": _kind(
        *("llava_next_video", _IMAGE | _VIDEO, "LlavaNextImageProcessor", "LlavaNextVideoProcessor"),
        sizes={**_CROP, "image_grid_pinpoints": _GRID},
        fields=_CLIP,
        image_grid_pinpoints=_GRID,
    ),
    "llava_onevision": _kind(
        *("llava_onevision", _IMAGE | _VIDEO, "LlavaOnevisionImageProcessor", "LlavaOnevisionProcessor"),
        sizes={**_SQUARE, "image_grid_pinpoints": _GRID},
        fields={"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
        image_grid_pinpoints=_GRID,
    ),
    "video_llava": _kind(
        *("video_llava", _IMAGE | _VIDEO, "VideoLlavaImageProcessor", "VideoLlavaProcessor"), sizes=_CROP, fields=_CLIP
    ),
    "aya_vision": _kind(
        *("aya_vision", {"image_token_id": "<|IMG_PATCH|>"}, "GotOcr2ImageProcessor", "AyaVisionProcessor"),
        mark="<image>",
        more=("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"),
        sizes={**_SQUARE, "crop_to_patches": True, "max_patches": 4},
        fields={"patch_size": 14, "img_size": 28, "downsample_factor": 2},
        downsample_factor=2,
    ),
    "deepseek_vl": _kind(
        *("deepseek_vl", _IMAGE, "DeepseekVLImageProcessor", "DeepseekVLProcessor"),
        sizes={**_SQUARE, "min_size": 14},
        fields={"num_image_tokens": 4},
        tokenizer={"image_token": "<image>"},
    ),
    "deepseek_vl_hybrid": _kind(
        *("deepseek_vl_hybrid", _IMAGE, "DeepseekVLHybridImageProcessor", "DeepseekVLHybridProcessor"),
        sizes={**_SQUARE, "min_size": 14, "high_res_size": {"height": 28, "width": 28}},
        fields={"num_image_tokens": 4},
        tokenizer={"image_token": "<image>"},
        high_res_vision_config=SamVisionConfig(
            hidden_size=32, mlp_dim=48, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14,
            global_attn_indexes=[1], window_size=2, output_channels=64, num_pos_feats=8,
        ),
    ),
    "aria": _kind(
        *("aria", _IMAGE, "AriaImageProcessor", "AriaProcessor"),
        sizes={"max_image_size": 490, "min_image_size": 336},
        fields={"size_conversion": {"490": 4, "980": 5}},
        tokenizer={"image_token": "<image>"},
        projector_patch_to_query_dict={1225: 4, 4900: 5},
    ),
    "paddleocr_vl": _kind(
        "paddleocr_vl",
        _IMAGE | _VIDEO | {"vision_start_token_id": "<vision>", "vision_end_token_id": "</vision>"},
        *("PaddleOCRVLImageProcessor", "PaddleOCRVLProcessor"),
        mark="<vision><image></vision>",
        sizes=_AREA,
        tokenizer={"image_token": "<image>"},
    ),
    "lighton_ocr": _kind(
        *("lighton_ocr", _IMAGE, "PixtralImageProcessor", "LightOnOcrProcessor"),
        more=("<break>", "<end>"),
        sizes={"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}},
        fields={"patch_size": 14, "spatial_merge_size": 2},
        tokenizer={"image_token": "<image>", "image_break_token": "<break>", "image_end_token": "<end>"},
    ),
    "qianfan_ocr": _kind(
        *("qianfan_ocr", {"image_token_id": "<IMG_CONTEXT>"}, "GotOcr2ImageProcessor", "QianfanOCRProcessor"),
        mark="<image>",
        more=("<img>", "</img>", "<image>"),
        sizes={**_SQUARE, "crop_to_patches": True, "max_patches": 4},
        fields={"image_seq_length": 1},
        tokenizer={
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        },
    ),
    "gemma4": _kind(
        "gemma4",
        _IMAGE | _VIDEO | {"audio_token_id": "<sound>", "boi_token_id": "<boi>", "eoi_token_id": "<eoi>"},
        *("Gemma4ImageProcessor", "Gemma4Processor"),
        more=("<|video|>", "<boa>", "<eoa>"),
        sizes=_GEMMA4_SIZES,
        tokenizer=_GEMMA4_TOKENS,
        vision={"position_embedding_size": 64},
    ),
    "granite_docling": _kind(
        *("granite_docling", _IMAGE, "GraniteDoclingImageProcessor", "GraniteDoclingProcessor"),
        more=("<fake_token_around_image>",),
        sizes=_SQUARE,
        fields={"image_seq_len": 1},
        vision={"scale_factor": 2},
    ),
}  # fmt: skip

# Their image processors need torchvision.
TORCHVISION_KINDS: dict[str, Kind] = {
    "cohere2_vision": _kind(
        *("cohere2_vision", _IMAGE, "Cohere2VisionImageProcessor", "Cohere2VisionProcessor"),
        more=("<boi>", "<eoi>", "<br>"),
        sizes={**_SQUARE, "patch_size": 1, "max_patches": 4},
        tokenizer={
            "image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>", "img_line_break_token": "<br>",
        },
    ),
    "gemma4_unified": _kind(
        "gemma4_unified",
        _IMAGE | _VIDEO | {"audio_token_id": "<sound>", "boi_token_id": "<boi>", "eoi_token_id": "<eoi>"},
        *("Gemma4UnifiedImageProcessor", "Gemma4UnifiedProcessor"),
        more=("<|video|>", "<boa>", "<eoa>"),
        sizes=_GEMMA4_SIZES,
        tokenizer=_GEMMA4_TOKENS,
    ),
    "lfm2_vl": _kind(
        *("lfm2_vl", _IMAGE, "Lfm2VlImageProcessor", "Lfm2VlProcessor"),
        more=(
            "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
            *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
        ),
        sizes={
            **_SQUARE, "tile_size": 28, "encoder_patch_size": 14, "min_image_tokens": 1, "max_image_tokens": 4, "max_tiles": 4,
        },
        vision={"num_patches": 16},
    ),
    "minimax_m3_vl": _kind(
        "minimax_m3_vl",
        {"image_token_id": "]<]image[>["},
        *("MiniMaxM3VLImageProcessor", "MiniMaxM3VLProcessor"),
        more=("]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
        sizes=_AREA,
    ),
    "step3p7": _kind(
        *("step3p7", {"image_token_id": "<im_patch>"}, "Step3p7ImageProcessor", "Step3p7Processor"),
        more=("<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
        sizes={"size": {"height": 112, "width": 112}, "patch_size": 56, "vision_patch_size": 14},
        vision={"image_size": 112, "position_embedding_size": 64},
    ),
}  # fmt: skip
KINDS |= TORCHVISION_KINDS
