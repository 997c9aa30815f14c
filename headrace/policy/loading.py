"""The policy's model and tokenizer from a local folder, and the digests that tell two folders apart.

safetensors only, and no code of the model's folder is run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import xxhash

from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16", "float16")
NO_PART_OF_THE_MODEL = ("_name_or_path", "_model_name_or_path", "transformers_version")
"""Keys of config.json that say where it came from, not what it computes."""
CHUNK = 1 << 24


def load_model(folder: Path, dtype: str, device: str = "cpu") -> PreTrainedModel:
    """The causal LM of `folder`, in evaluation mode, with parameters of `dtype` ("float32", "bfloat16", "float16").

    Raises ModelError when it cannot be loaded.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if dtype not in DTYPES:
        raise ModelError(f"model dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = _first_line(error)
        raise ModelError(f"model folder {folder} does not load as a causal language model: {reason}") from error
    model, info = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    if missing := sorted(info["missing_keys"]):  # they would be random numbers
        raise ModelError(f"model folder {folder} lacks {len(missing)} tensors of its model; the first is {missing[0]}")
    try:
        torch.nn.Module.to(model, torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"model.device = {device!r} does not take the model: {_first_line(error)}") from error
    model.train(False)
    return model


def model_width(folder: Path) -> tuple[int, int]:
    """(hidden, intermediate) size of the model in `folder`: the shape of its largest matrix products.

    Raises ModelError when its config cannot be read.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model folder {folder} has no config that loads: {_first_line(error)}") from error
    return config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `folder`. Raises ModelError when it cannot be loaded or has no end-of-sequence token."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"model folder {folder} has no tokenizer that loads: {_first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {folder} has no end-of-sequence token; set eos_token in tokenizer_config.json"
        )
    return tokenizer


def model_digests(folder: Path) -> dict[str, str]:
    """xxh3-128 digests, hex, of "model" (config and weights), "tokenizer" and "chat_template".

    Needs neither torch nor transformers. Raises ModelError when the folder cannot be read.
    """
    try:
        config = _json(folder / "config.json")
        tokenizer_config = _json(folder / "tokenizer_config.json")
        template = _template(folder, tokenizer_config.pop("chat_template", None))
        for key in NO_PART_OF_THE_MODEL:
            config.pop(key, None)
            tokenizer_config.pop(key, None)
        weights = sorted(folder.glob("*.safetensors"))
        vocabulary = [folder / name for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")]
        return {
            "model": _digest(json.dumps(config, sort_keys=True), weights),
            "tokenizer": _digest(json.dumps(tokenizer_config, sort_keys=True), [f for f in vocabulary if f.is_file()]),
            "chat_template": _digest(template, []),
        }
    except (OSError, ValueError) as error:
        raise ModelError(f"model folder {folder} cannot be read: {_first_line(error)}") from error


def layout_of(model: torch.nn.Module, wire_dtype: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of each parameter in order, tied ones once: what a weight version of this model holds."""
    return [(name, wire_dtype, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def _template(folder: Path, inline: Any) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return inline if isinstance(inline, str) else json.dumps(inline, sort_keys=True)


def _digest(text: str, files: list[Path]) -> str:
    state = xxhash.xxh3_128(text.encode())
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                state.update(chunk)
    return state.hexdigest()


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    fields = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return fields


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
