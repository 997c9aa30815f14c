"""What a trainer consists of, put together from a run's record: model, optimizer, newest checkpoint, bounds."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from broker.api import Fence, RunRecord, RunState
from broker.connect import Run
from consumers import checkpoint
from consumers.admission import Window
from consumers.checkpoint import Checkpoints, Loaded
from consumers.curriculum import Curriculum, Source, held_out_of, sources_of
from consumers.evaluation import Decode
from consumers.ingest import SeenTasks
from consumers.lag import Staleness
from consumers.placing import sweep
from consumers.ranks.group import Ranks
from consumers.ranks.orders import Begin
from consumers.reference import load_reference
from consumers.retention import MOST_STEPS
from consumers.trainer import Trainer
from headrace.config import Config
from headrace.config_sources import stored
from headrace.errors import Refused, ServiceError
from headrace.policy.loading import layout_of, load_model, load_tokenizer, model_digests
from headrace.policy.memory import keep_freed_memory
from headrace.policy.prepare import resolve_model
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion
from weightsync.manifest import Layout

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Everything that is settled before the loops begin."""

    run_id: str
    folder: Path
    config: Config
    fence: Fence
    model_folder: Path
    model: Any
    trainer: Trainer
    ranks: Ranks
    layout: Layout
    checkpoints: Checkpoints
    loaded: Loaded | None
    window: Window
    curriculum: Curriculum
    held_out: tuple[Source, ...]
    seen: SeenTasks
    """The verdicts that the newest checkpoint contains."""
    staleness: Staleness
    decode: Decode
    lane: Lane
    cursor: int
    """Number of the next training prompt."""
    made: int
    """The newest step that any trainer of this run has made."""

    @property
    def base_step(self) -> int:
        """The step of the weights as they were loaded."""
        return self.loaded.position.version.step if self.loaded else 0


@dataclass(frozen=True, slots=True)
class Taken:
    """A run that this trainer has taken."""

    record: RunRecord
    fence: Fence
    state: RunState
    """As the trainer before left it."""
    newest: tuple[PolicyVersion, Path] | None
    """The newest checkpoint, where there is one."""


async def take_run(port: Run, resume: bool) -> Taken:
    """Become the run's trainer before anything is read, so that an earlier one can change nothing of it any more.

    Raises Refused for a run that is not there, ServiceError for one that another trainer began and `resume` is not set.
    """
    record = await port.record()
    folder = Path(record.folder)
    begun, state = checkpoint.last_incarnation(folder), await port.state()
    if not resume and (begun or state.incarnation):
        raise ServiceError(f"run {record.run_id} has been trained before; --resume goes on with it")
    # Redis may have lost the newest: two of one number would publish different weights under one name.
    fence = await port.take_fence(begun)
    await asyncio.to_thread(_begin, folder, fence.incarnation)
    # Read again: what was there before the fence may have been followed by another one.
    return Taken(record, fence, await port.state(), checkpoint.newest(folder))


def _begin(folder: Path, incarnation: int) -> None:
    sweep((folder, *folder.glob("checkpoints/*/")), incarnation)
    try:
        checkpoint.begin(folder, incarnation)
    except OSError as error:
        # A full disk is no reason not to train: it may have room before the next checkpoint.
        log.warning("the run's folder does not know of incarnation %d: %s", incarnation, error.strerror)


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """What every rank loads."""

    folder: Path
    model: Any
    trainer: Trainer
    layout: Layout
    """In as many parts as there are ranks."""
    loaded: Loaded | None


def load(record: RunRecord, newest: Path | None, lane: Lane, ranks: Ranks) -> Model:
    """The model, and the checkpoint in folder `newest`. Blocks for seconds; all ranks load at once.

    Raises ModelError, ConfigError, CheckpointError, Refused when the model is not the run's.
    """
    config = stored(record.config)
    keep_freed_memory()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(config.trainer.threads)
    torch.manual_seed(config.run.seed)
    folder, device = resolve_model(config.model.path), device_of(config.model.device, ranks.local)
    _check_digests(folder, record)
    # The whole of a model that is spread over ranks need not fit on one device.
    first = "cpu" if ranks.sharded else device
    model = load_model(folder, "float32", first)
    reference = load_reference(config, folder, record.digests, first)
    trainer = Trainer(model, config, lane, reference, ranks, device)
    loaded = checkpoint.load(newest, (ranks.rank, ranks.size), whole=False) if newest else None
    if loaded:
        checkpoint.restore(model, trainer.optimizer, loaded)
    layout = Layout.of(layout_of(model, config.model.wire_dtype), parts=ranks.size)
    return Model(folder, model, trainer, layout, loaded)


def build(taken: Taken, lane: Lane, ranks: Ranks) -> Parts:
    """Load the model with all ranks, and settle the rest. Blocks for seconds. Raises as `load` does."""
    record, fence, newest = taken.record, taken.fence, taken.newest[1] if taken.newest else None
    ranks.tell(Begin(fence.incarnation, str(newest or "")))
    model = load(record, newest, lane, ranks)
    config, loaded, tokenizer = stored(record.config), model.loaded, load_tokenizer(model.folder)
    folder = Path(record.folder)
    window = Window(config.trainer.groups_per_step, config.staleness.max_lag, config.run.steps)
    return Parts(
        run_id=record.run_id,
        folder=folder,
        config=config,
        fence=fence,
        model_folder=model.folder,
        model=model.model,
        trainer=model.trainer,
        ranks=ranks,
        layout=model.layout,
        checkpoints=Checkpoints(folder, fence.incarnation, config.checkpoint.keep),
        loaded=loaded,
        window=window,
        curriculum=Curriculum(config.run.seed, sources_of(config, record.dataset_sizes)),
        held_out=held_out_of(config, record.dataset_sizes),
        seen=SeenTasks(seen_capacity(config, window), loaded.position.seen if loaded else None),
        staleness=Staleness(config.staleness.max_lag, config.staleness.stale == "mask"),
        decode=lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=True)),
        lane=lane,
        cursor=max(taken.state.cursor, loaded.position.cursor if loaded else 0),
        made=taken.state.step,
    )


def device_of(wanted: str, local: int = 0) -> str:
    """ "auto" is the GPU of this number on this host where there is one, else the CPU; "cuda" is that GPU."""
    if wanted not in ("auto", "cuda"):
        return wanted
    return f"cuda:{local}" if wanted == "cuda" or torch.cuda.is_available() else "cpu"


def seen_capacity(config: Config, window: Window) -> int:
    """Task ids to remember: all that can be outstanding or lie between two checkpoints, four times over."""
    steps = min(config.checkpoint.every, MOST_STEPS) + 1
    groups = config.trainer.groups_per_step * (1 + config.trainer.dynamic_sampling)
    return 4 * (window.slots + steps * groups) + 1024


def _check_digests(folder: Path, record: RunRecord) -> None:
    digests = model_digests(folder)
    for name, digest in record.digests.items():
        if name in digests and digests[name] != digest:
            raise Refused(f"{name} in {folder} is not that of run {record.run_id}; use the folder it was started with")
