"""Export: a checkpoint as a Hugging Face folder that `transformers` loads.

The folder says itself that an export made it, of which run and version, and of which files. Only such a folder is
replaced, and only as long as nothing else was put into it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from consumers import checkpoint, placing
from consumers.checkpoint import reason_of
from headrace.errors import CheckpointError
from headrace.policy.loading import load_model
from headrace.version import PolicyVersion

MARKER = "headrace-export.json"
"""The file that only an export writes."""
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".gguf", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose weights they are."""

    run_id: str
    version: PolicyVersion


def export(checkpoint_folder: Path, model_folder: Path, out: Path, dtype: str = "bfloat16") -> Path:
    """Write the checkpoint's weights in `dtype` with the config and tokenizer of `model_folder`; returns `out`.

    Raises CheckpointError when the checkpoint cannot be read or `out` not be written, ModelError for the model.
    """
    check_place(out, model_folder)
    loaded = checkpoint.load(checkpoint_folder)
    origin = Origin(checkpoint_folder.absolute().parents[2].name, loaded.position.version)
    return export_tensors(loaded.model, origin, model_folder, out, dtype)


def export_tensors(
    tensors: Mapping[str, torch.Tensor], origin: Origin, model_folder: Path, out: Path, dtype: str
) -> Path:
    """The same of weights by parameter name. Where `out` is a link, what it leads to is written."""
    check_place(out, model_folder)
    real = Path(os.path.realpath(out))
    work = placing.beside(real, 0)
    prepare(tensors, origin, load_model(model_folder, dtype, "cpu"), model_folder, work)
    place(work, real)
    return out


def check_place(out: Path, model_folder: Path) -> None:
    """Raises CheckpointError where `out` is something that an export must not replace."""
    real = Path(os.path.realpath(out))
    if real == Path(os.path.realpath(model_folder)):
        raise CheckpointError(f"{out} is the model that the run began with; export into another folder")
    try:
        found = {path.name for path in real.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{out} cannot be replaced: {reason_of(error)}; export into another folder") from error
    if "checkpoints" in found and "config.json" in found:
        raise CheckpointError(f"{out} is the folder of a run; export into another folder")
    if not found:
        return
    made = _made(real)
    if not made:
        raise CheckpointError(f"{out} is there and no export made it; export into another folder")
    if others := sorted(found - made):
        raise CheckpointError(f"{out} holds {others[0]}, which no export wrote; export into another folder")


def _made(folder: Path) -> set[str]:
    """Names of the files that an export wrote there, its marker among them; none where it made no such folder."""
    try:
        files = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
        return {MARKER, *map(str, files)}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def prepare(tensors: Mapping[str, torch.Tensor], origin: Origin, model: Any, model_folder: Path, work: Path) -> None:
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
        _mark(work, origin)
    except (OSError, SafetensorError) as error:
        placing.remove(work)
        raise CheckpointError(f"exported model {work} cannot be written: {reason_of(error)}") from error


def _mark(work: Path, origin: Origin) -> None:
    """Raises OSError."""
    files = sorted({file.name for file in work.iterdir()} - {MARKER})
    text = json.dumps({"run": origin.run_id, "version": str(origin.version), "files": files}, indent=2)
    (work / MARKER).write_text(text + "\n", encoding="utf-8")


def place(work: Path, out: Path) -> Path:
    """Raises CheckpointError."""
    try:
        placing.place(work, out)
    except OSError as error:
        raise CheckpointError(f"exported model {out} cannot be written: {reason_of(error)}") from error
    return out
