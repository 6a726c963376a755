"""``kvrelay calibrate-kv``: scales for an fp8 KV pool, from what a model makes of text (:mod:`kvrelay.engine.kv_calibration`)."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import torch

from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.engine.engine_options import EngineOptions
from kvrelay.engine.kv_calibration import largest_kv, scales_for
from kvrelay.engine.kv_scales import FILE_NAME, checkpoint_kv_scales, save_kv_scales
from kvrelay.engine.model_config import load_config
from kvrelay.engine.weights import checkpoint_files
from kvrelay.gateway.chat_template import ChatTemplate
from kvrelay.gateway.errors import ChatTemplateError
from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.prompts import Encode, built_in_prompts, prompts_from_file

_MAX_PROMPT_LEN = (
    4096  # a pool for one is to fit the memory; rotation goes on turning keys beyond it, but does not lengthen them
)
_NUM_RANDOM, _RANDOM_LEN = 4, 512
_CHAT = (
    ("user", "What is 17 * 23, and how did you get there? Answer in JSON with the keys \"result\" and \"steps\"."),
    ("assistant", '{"result": 391, "steps": ["17 * 20 = 340", "17 * 3 = 51", "340 + 51 = 391"]}'),
    ("user", "Now write it as a Python function, with a test.\n\n    def multiply(a: int, b: int) -> int: ..."),
    ("assistant", "```python\ndef multiply(a: int, b: int) -> int:\n    return a * b\n\n\nassert multiply(17, 23) == 391\n```"),
    ("user", "Erkläre es bitte auf Deutsch. 谢谢"),
)  # fmt: skip


def calibrate(model: str, prompts: Path | None, output: Path | None, device: str) -> Path:
    """Write the scales and return their file. Progress, and what they are, goes to stderr.

    ``prompts``: JSON lines; None takes a small built-in text. ``output``: None is the place in the model's directory where workers
    look for it. Raises SettingsError for a bad file, ModelError if the model cannot be loaded or has scales of its own.
    """
    directory = resolve_model(model)
    target = directory / FILE_NAME if output is None else output.absolute()
    if not os.access(target.parent, os.W_OK) or target.is_dir():
        raise SettingsError(
            f"--output: cannot write {target}; name a file in a directory that is there and can be written to"
        )
    config, files = load_config(directory), checkpoint_files(directory)
    if checkpoint_kv_scales(files, config) is not None:
        raise ModelError(
            f"{directory}: the checkpoint has K/V scales of its own, which workers take: there is nothing to do"
        )
    max_len = min(_MAX_PROMPT_LEN, config.max_position_embeddings)
    tokenizer = Tokenizer.load(directory)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=True)

    if prompts is None:
        token_ids = list(_built_in(tokenizer, encode, directory, max_len, config.vocab_size))
    else:
        given = prompts_from_file(prompts, lambda text: encode(text)[:max_len], max_len)
        token_ids = [list(prompt.token_ids) for prompt in given]
    options = EngineOptions(directory, directory.name, device=device, num_threads=os.cpu_count() or 1)
    total = sum(map(len, token_ids))
    with click.progressbar(length=total, label=f"keys and values of {total} tokens", file=sys.stderr) as bar:
        try:
            largest = largest_kv(options, token_ids, lambda done, _: bar.update(done - bar.pos))
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ModelError(
                f"model and prompts do not fit the memory ({error}): take shorter --prompts, --device cpu, or a GPU that is free"
            ) from error
    try:
        save_kv_scales(target, scales_for(largest))
    except OSError as error:
        raise SettingsError(f"--output: cannot write {target} ({error.strerror})") from error
    for kind, name in enumerate(("keys", "values")):
        heads = largest[:, kind]
        click.echo(f"largest of {name}: {heads.min():.3g} to {heads.max():.3g} by layer and KV head", err=True)
    return target


def _built_in(
    tokenizer: Tokenizer, encode: Encode, directory: Path, max_len: int, vocab_size: int
) -> Iterator[list[int]]:
    """Plain sentences, a chat in the model's own template, random tokens: always the same. Each up to ``max_len`` token ids."""
    for prompt in built_in_prompts(encode, max_len):
        yield list(prompt.token_ids)
    template = ChatTemplate.load(directory, tokenizer.special_tokens)
    try:
        text = template.render([{"role": role, "content": content} for role, content in _CHAT])
    except ChatTemplateError:
        pass  # a model without one, or with one that has its own idea of a chat
    else:
        if chat := tokenizer.encode(text, add_special_tokens=False)[:max_len]:
            yield chat
    begin = encode("")  # what stands before every text: where models put their largest keys
    for seed in range(_NUM_RANDOM):
        chooser = random.Random(seed)  # noqa: S311 - the same tokens at every run are wanted
        yield [*begin, *(chooser.randrange(vocab_size) for _ in range(_RANDOM_LEN))][:max_len]
