"""Makes a checkpoint's processor, which turns images into numbers and into text for a prompt.

The library's own way to load one (``AutoProcessor``) also loads what reads videos and sounds, for which packages may be missing.
Here something empty stands in for those. No code of a checkpoint runs.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import transformers
from transformers import PROCESSOR_MAPPING, AutoImageProcessor, AutoTokenizer, PreTrainedConfig, ProcessorMixin

from kvrelay.common.errors import ModelError

PREPROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class _Absent(dict[str, Any]):
    """Stands in for a part that no image needs. transformers writes a processor's parts as JSON, so it is a dictionary."""

    def __getattr__(self, name: str) -> None:
        """A processor may read fields of it."""
        if name.startswith("__"):
            raise AttributeError(name)


class RowsProcessor(ProcessorMixin):  # type: ignore[misc]  # transformers has no types
    """Pixtral's processor, for images. The library's own cannot be imported without torchvision, which it does not use for them."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        image_token: str = "[IMG]",  # noqa: S107 - tokens of text
        image_break_token: str = "[IMG_BREAK]",  # noqa: S107
        image_end_token: str = "[IMG_END]",  # noqa: S107
        **_: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token = image_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        self._row_end, self._image_end = image_break_token, image_end_token
        self._patch = patch_size * spatial_merge_size
        self.images_kwargs = {"patch_size": self._patch}

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        """Rows of placeholders, each with its end."""
        height, width = (int(size) // self._patch for size in image_inputs["image_sizes"][image_idx])
        rows = [self.image_token * width] * height
        return self._row_end.join(rows) + self._image_end


# SmolVLM's own processor demands a package that spells numbers, for videos. Idefics3's is equal for images.
_OTHERS: dict[str, type[Any]] = {
    "PixtralProcessor": RowsProcessor,
    "SmolVLMProcessor": transformers.Idefics3Processor,
}


def preprocessor_digest(directory: Path) -> str:
    """A digest of the files that say how images are prepared; "" without such files. K/V of images depend on them."""
    digest, is_there = hashlib.sha256(), False
    for name in PREPROCESSOR_FILES:
        path = directory / name
        if path.is_file():
            digest.update(f"{name} {path.stat().st_size} ".encode() + path.read_bytes())
            is_there = True
    return digest.hexdigest() if is_there else ""


def load_processor(directory: Path, config: PreTrainedConfig) -> Any:
    """The processor of a checkpoint, for images and text. ``config``: of the checkpoint.

    Raises ModelError naming what is missing.
    """
    if not any((directory / name).is_file() for name in PREPROCESSOR_FILES):
        raise ModelError(f"{directory} has no {PREPROCESSOR_FILES[0]}, which says how images are prepared")
    name = _class_name(directory, config)
    try:
        processor_class = _OTHERS.get(name) or getattr(transformers, name)
        parts = [_part(attribute, directory, config) for attribute in processor_class.get_attributes()]
        fields, _ = processor_class.get_processor_dict(str(directory), local_files_only=True)
        return _without_videos(processor_class).from_args_and_dict(parts, fields)
    except Exception as error:  # processors raise anything, mostly about what is not installed
        reason = next(iter(str(error).strip().splitlines()), "")
        raise ModelError(f"transformers makes no {name} of {directory}: {type(error).__name__}: {reason}") from error


def _class_name(directory: Path, config: PreTrainedConfig) -> str:
    """The processor's class: what the checkpoint says, else what suits its type. Raises ModelError."""
    for file_name in (*reversed(PREPROCESSOR_FILES), "tokenizer_config.json"):
        path = directory / file_name
        try:
            name = json.loads(path.read_text(encoding="utf-8")).get("processor_class") if path.is_file() else None
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{path} cannot be read ({error!r}): fetch it again") from error
        if isinstance(name, str) and name.endswith("Processor"):
            return name
    found = PROCESSOR_MAPPING.get(type(config), None)
    if found is None:
        raise ModelError(f"transformers has no processor for type {config.model_type}")
    return str(found.__name__)


def _part(attribute: str, directory: Path, config: PreTrainedConfig) -> Any:
    """What a processor is made of."""
    how: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if "tokenizer" in attribute:
        return AutoTokenizer.from_pretrained(str(directory), **how)
    if attribute == "image_processor":
        return AutoImageProcessor.from_pretrained(str(directory), config=config, **how)
    return _Absent()


def _without_videos(processor_class: Any) -> Any:
    """The class, with empty parts allowed."""

    def check(self: Any, name: str, part: Any) -> Any:
        return None if isinstance(part, _Absent) else processor_class.check_argument_for_proper_class(self, name, part)

    members = {"check_argument_for_proper_class": check, "__module__": processor_class.__module__}
    return type(processor_class.__name__, (processor_class,), members)
