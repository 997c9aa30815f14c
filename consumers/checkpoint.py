"""Checkpoints: everything that the next step depends on, as safetensors and JSON.

`<run folder>/checkpoints/<incarnation>/<step>/` holds `model.safetensors` (float32, names as in the Hugging Face
model), `optimizer.safetensors` (AdamW moments and random state) and `state.json`, which is written last and carries
the digests of the others and of what it says itself. Ranks that have parts of the model write a file each instead of
the first two (`consumers/sharded.py`). A checkpoint is written into a folder beside it, synced, and renamed (see
`consumers/placing.py`): it is there whole or not at all. Each incarnation removes only its own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from broker.messages import Verdict
from consumers import placing, sharded
from consumers.ranks.sharding import placed
from headrace.errors import CheckpointError
from headrace.version import PolicyVersion

FORMAT = 3
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
WEIGHTS = "weights."
"""Before the name of a parameter in the file of a rank."""
CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class RunPosition:
    """Where a run is, beside its tensors."""

    version: PolicyVersion
    """The version that these weights are."""
    cursor: int
    """Number of the next training task."""
    seen: dict[str, Verdict] = field(default_factory=dict)
    """The newest tasks that were judged already, oldest first, with their verdicts."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    folder: Path
    position: RunPosition
    config: dict[str, Any]
    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]


class Checkpoints:
    """The checkpoints of one incarnation in one run folder."""

    def __init__(self, run_folder: Path, incarnation: int, keep: int) -> None:
        self._folder = run_folder / "checkpoints" / str(incarnation)
        self._incarnation = incarnation
        self._keep = keep

    def prepare(
        self,
        position: RunPosition,
        config: Mapping[str, Any],
        model: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, torch.Tensor],
    ) -> Path:
        """Write one beside its place, which is returned. The tensors may not change until then.

        Raises CheckpointError, with the checkpoints before intact and nothing half-written left behind.
        """
        work = self.begin(position.version)
        try:
            save_file(_contiguous(model), work / MODEL, metadata={"format": "pt"})
            save_file(_contiguous(optimizer), work / OPTIMIZER)
            digests = {name: digest_synced(work / name) for name in (MODEL, OPTIMIZER)}
        except (OSError, SafetensorError) as error:
            raise self.failed(position.version, reason_of(error)) from error
        return self.seal(position, config, digests)

    def begin(self, version: PolicyVersion) -> Path:
        """An empty folder beside the place of this version's. Raises CheckpointError."""
        work = placing.beside(self._final(version), self._incarnation)
        try:
            placing.remove(work)
            work.mkdir(parents=True)
        except OSError as error:
            raise self.failed(version, reason_of(error)) from error
        return work

    def seal(self, position: RunPosition, config: Mapping[str, Any], digests: Mapping[str, str]) -> Path:
        """Say in it what it is, once its files are synced; returns its place. Raises CheckpointError."""
        final = self._final(position.version)
        file = placing.beside(final, self._incarnation) / STATE
        state = {
            "format": FORMAT,
            "version": list(position.version),
            "cursor": position.cursor,
            "seen": position.seen,
            "config": dict(config),
            "digests": dict(digests),
        }
        try:
            file.write_text(json.dumps({**state, "digest": _digest_of(state)}), encoding="utf-8")
            _sync(file)
        except OSError as error:
            raise self.failed(position.version, reason_of(error)) from error
        return final

    def failed(self, version: PolicyVersion, reason: str) -> CheckpointError:
        """Removes what was prepared of it; the error says why."""
        final = self._final(version)
        placing.remove(placing.beside(final, self._incarnation))
        return CheckpointError(f"checkpoint {final} cannot be written: {reason}")

    def _final(self, version: PolicyVersion) -> Path:
        return self._folder / f"{version.step:08d}"

    def place(self, final: Path) -> None:
        """Put a prepared one in its place. Raises CheckpointError."""
        try:
            placing.place(placing.beside(final, self._incarnation), final)
            _sync(self._folder)
        except OSError as error:
            placing.remove(placing.beside(final, self._incarnation))
            raise CheckpointError(f"checkpoint {final} cannot be written: {reason_of(error)}") from error

    def trim(self) -> None:
        """Remove the oldest over `keep`; not before the broker knows what the newest contains."""
        for folder in sorted(self._folder.glob("[0-9]*"))[: -self._keep]:
            shutil.rmtree(folder, ignore_errors=True)


def begin(run_folder: Path, incarnation: int) -> None:
    """Leave a trace of an incarnation before it publishes anything: a Redis that is emptied forgets that it was.

    Raises OSError.
    """
    folder = run_folder / "checkpoints" / str(incarnation)
    folder.mkdir(parents=True, exist_ok=True)
    _sync(folder.parent)


def last_incarnation(run_folder: Path) -> int:
    """The newest incarnation that has begun in this folder; 0 where none has."""
    names = [folder.name for folder in (run_folder / "checkpoints").glob("[0-9]*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def folder_of(run_folder: Path, version: PolicyVersion) -> Path:
    """Where the checkpoint of this version lies, if there is one."""
    return run_folder / "checkpoints" / str(version.incarnation) / f"{version.step:08d}"


def newest(run_folder: Path) -> tuple[PolicyVersion, Path] | None:
    """The newest complete checkpoint of any incarnation, with the version in its path."""
    found = [
        (PolicyVersion(int(state.parent.parent.name), int(state.parent.name)), state.parent)
        for state in (run_folder / "checkpoints").glob(f"*/*/{STATE}")
        if state.parent.name.isdigit() and state.parent.parent.name.isdigit()
    ]
    return max(found, default=None)


def load(folder: Path, share: tuple[int, int] = (0, 1), *, whole: bool = True) -> Loaded:
    """Read a checkpoint and check it against its digests and its place.

    Of several that read it, each may check a share of its files: which of how many. Without `whole` the tensors of one
    that ranks have written stay there; `restore` reads what it needs of them.

    Raises CheckpointError with what is wrong and the way out.
    """
    way_out = "remove this folder to resume from the one before"
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {folder} has format {state['format']}, this program reads {FORMAT}; {way_out}"
            )
        if damage := _damage(folder, state, share):
            raise CheckpointError(f"checkpoint {folder} is damaged: {damage}; {way_out}")
        position = RunPosition(PolicyVersion(*state["version"]), int(state["cursor"]), dict(state["seen"]))
        return Loaded(folder, position, state["config"], *_tensors(folder, state["digests"], whole=whole))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {reason_of(error)}; {way_out}") from error


def _tensors(folder: Path, files: Mapping[str, str], *, whole: bool) -> tuple[dict[str, torch.Tensor], ...]:
    """Of the model, and of the optimizer."""
    if MODEL in files:
        return load_file(folder / MODEL), load_file(folder / OPTIMIZER)
    found = sharded.read(folder) if whole else {}
    model = {name.removeprefix(WEIGHTS): tensor for name, tensor in found.items() if name.startswith(WEIGHTS)}
    return model, {name: tensor for name, tensor in found.items() if not name.startswith(WEIGHTS)}


def _damage(folder: Path, state: dict[str, Any], share: tuple[int, int]) -> str:
    """What is not as it was written; empty where all is. Raises OSError, KeyError."""
    if state.pop("digest") != _digest_of(state):
        return f"{STATE} is not what was written"
    which, of = share
    for name, digest in sorted(state["digests"].items())[which::of]:
        if _digest(folder / name) != digest:
            return f"{name} is not what was written"
    version = PolicyVersion(*state["version"])
    if folder.absolute().parts[-2:] != (str(version.incarnation), f"{version.step:08d}"):
        return f"it is version {version}, which is not what the folder's name says"
    return ""


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's state by parameter name ("exp_avg.<name>", …), and the random state as "random.cpu"."""
    tensors = {"random.cpu": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{name}"] = value
    return tensors


def restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loaded: Loaded) -> None:
    """Put a checkpoint's tensors into model and optimizer. Raises CheckpointError when they are another model's."""
    parameters = dict(model.named_parameters())
    if not loaded.model:
        loaded = _read_parts(parameters, loaded)
    if {name: tensor.shape for name, tensor in loaded.model.items()} != {
        name: parameter.shape for name, parameter in parameters.items()
    }:
        raise CheckpointError(f"checkpoint {loaded.folder} is of another model than the run's")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(placed(loaded.model[name], parameter))
    for key, value in loaded.optimizer.items():
        kind, _, name = key.partition(".")
        if kind == "random":
            torch.set_rng_state(value)
        else:
            parameter = parameters[name]
            # AdamW keeps its count of steps as a float32 scalar on the device, the moments in the parameter's dtype.
            optimizer.state[parameter][kind] = placed(value, parameter) if value.dim() else value.to(parameter.device)


def _read_parts(parameters: Mapping[str, torch.nn.Parameter], loaded: Loaded) -> Loaded:
    """What this rank needs of the files of ranks: tensors in the shards of the parameters."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        for name, size in sharded.sizes(loaded.folder).items():
            kind, _, parameter = name.partition(".")
            like = parameters.get(parameter)
            if like is not None and size == like.shape:
                tensors[name] = torch.zeros_like(like.detach())
            else:
                tensors[name] = torch.zeros(size, dtype=torch.uint8 if kind == "random" else torch.float32)
        sharded.read_into(tensors, loaded.folder)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {loaded.folder} cannot be read: {reason_of(error)}") from error
    model = {name.removeprefix(WEIGHTS): tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS)}
    return replace(loaded, model=model, optimizer={k: v for k, v in tensors.items() if not k.startswith(WEIGHTS)})


def _contiguous(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _digest_of(state: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(state).encode())


def digest_synced(file: Path) -> str:
    """Of a file that is on the disk from here on. Raises OSError."""
    _sync(file)
    return _digest(file)


def _digest(file: Path) -> str:
    state = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            state.update(chunk)
    return state.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason_of(error: Exception) -> str:
    """What the operating system says, in lower case, or else the error's first line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error).splitlines()[0] if str(error) else type(error).__name__
