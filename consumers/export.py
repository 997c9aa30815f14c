"""Export: a checkpoint as a Hugging Face folder that `transformers` loads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from consumers import checkpoint, placing
from consumers.checkpoint import reason_of
from headrace.errors import CheckpointError
from headrace.policy.loading import load_model

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".gguf", ".pt", ".pth")


def export(checkpoint_folder: Path, model_folder: Path, out: Path, dtype: str = "bfloat16") -> Path:
    """Write the checkpoint's weights in `dtype` with the config and tokenizer of `model_folder`; returns `out`.

    Raises CheckpointError when the checkpoint cannot be read or `out` not be written, ModelError for the model.
    """
    return export_tensors(checkpoint.load(checkpoint_folder).model, model_folder, out, dtype)


def export_tensors(tensors: Mapping[str, torch.Tensor], model_folder: Path, out: Path, dtype: str) -> Path:
    """The same of weights by parameter name."""
    check_place(out)
    work = placing.beside(out, 0)
    prepare(tensors, load_model(model_folder, dtype, "cpu"), model_folder, work)
    return place(work, out)


def check_place(out: Path) -> None:
    """Raises CheckpointError where `out` is something that an export must not replace."""
    if out.exists() and not (out / "config.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is there and holds no model; export into another folder")


def prepare(tensors: Mapping[str, torch.Tensor], model: Any, model_folder: Path, work: Path) -> None:
    """Fill `model` (as `load_model` returns it, in the dtype to write) with `tensors` and save it whole into `work`.

    Raises CheckpointError, with nothing left of it.
    """
    parameters = dict(model.named_parameters())
    if parameters.keys() != tensors.keys():
        raise CheckpointError(f"the weights to export are not those of the model in {model_folder}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    try:
        placing.remove(work)
        work.mkdir(parents=True)
        model.save_pretrained(work)
        for file in sorted(model_folder.iterdir()):
            if file.is_file() and not file.name.endswith(WEIGHTS) and not (work / file.name).exists():
                shutil.copyfile(file, work / file.name)
    except (OSError, SafetensorError) as error:
        placing.remove(work)
        raise CheckpointError(f"exported model {work} cannot be written: {reason_of(error)}") from error


def place(work: Path, out: Path) -> Path:
    """Raises CheckpointError."""
    try:
        placing.place(work, out)
    except OSError as error:
        raise CheckpointError(f"exported model {out} cannot be written: {reason_of(error)}") from error
    return out
