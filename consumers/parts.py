"""What a trainer consists of, put together from a run's record: model, optimizer, newest checkpoint, bounds."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from broker.api import Fence, RunRecord
from broker.connect import Run
from consumers import checkpoint
from consumers.admission import Window
from consumers.checkpoint import Checkpoints, Loaded
from consumers.curriculum import Curriculum, Source, held_out_of, sources_of
from consumers.evaluation import Decode
from consumers.ingest import SeenTasks
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
    layout: Layout
    checkpoints: Checkpoints
    loaded: Loaded | None
    window: Window
    curriculum: Curriculum
    held_out: Source
    trained: SeenTasks
    """Tasks that the newest checkpoint contains."""
    decode: Decode
    lane: Lane

    @property
    def base_step(self) -> int:
        """The step of the weights as they were loaded."""
        return self.loaded.position.version.step if self.loaded else 0


async def take_run(port: Run, resume: bool) -> tuple[RunRecord, Fence, tuple[PolicyVersion, Path] | None]:
    """Become the run's trainer before anything is read: its record, the fence, and the newest checkpoint's place.

    Raises Refused for a run that is not there, ServiceError for one that another trainer began and `resume` is not set.
    """
    record = await port.record()
    found = checkpoint.newest(Path(record.folder))
    begun = (await port.state()).incarnation
    if not resume and (found or begun):
        raise ServiceError(f"run {record.run_id} has been trained before; --resume goes on with it")
    return record, await port.take_fence(found[0].incarnation if found else 0), found


def build(record: RunRecord, fence: Fence, found: tuple[PolicyVersion, Path] | None, lane: Lane) -> Parts:
    """Load the model, and the checkpoint where there is one. Blocks for seconds.

    Raises ModelError, ConfigError, CheckpointError, Refused when the model is not the run's.
    """
    config = stored(record.config)
    keep_freed_memory()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(config.trainer.threads)
    torch.manual_seed(config.run.seed)
    model_folder = resolve_model(config.model.path)
    _check_digests(model_folder, record)
    model = load_model(model_folder, "float32", device_of(config.model.device))
    tokenizer = load_tokenizer(model_folder)
    trainer = Trainer(model, config, lane)
    loaded = checkpoint.load(found[1]) if found else None
    if loaded:
        checkpoint.restore(model, trainer.optimizer, loaded)
    folder = Path(record.folder)
    window = Window(config.trainer.groups_per_step, config.staleness.max_lag, config.run.steps)
    return Parts(
        run_id=record.run_id,
        folder=folder,
        config=config,
        fence=fence,
        model_folder=model_folder,
        model=model,
        trainer=trainer,
        layout=Layout.of(layout_of(model, config.model.wire_dtype)),
        checkpoints=Checkpoints(folder, fence.incarnation, config.checkpoint.keep),
        loaded=loaded,
        window=window,
        curriculum=Curriculum(config.run.seed, sources_of(config, record.dataset_sizes)),
        held_out=held_out_of(config, record.dataset_sizes),
        trained=SeenTasks(seen_capacity(config, window), loaded.position.seen if loaded else ()),
        decode=lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=True)),
        lane=lane,
    )


def device_of(wanted: str) -> str:
    """ "auto" is the first GPU where there is one, else the CPU."""
    if wanted != "auto":
        return wanted
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def seen_capacity(config: Config, window: Window) -> int:
    """Task ids to remember: all that can be outstanding or lie between two checkpoints, four times over."""
    return 4 * (window.slots + (config.checkpoint.every + 1) * config.trainer.groups_per_step) + 1024


def _check_digests(folder: Path, record: RunRecord) -> None:
    digests = model_digests(folder)
    for name, digest in record.digests.items():
        if name in digests and digests[name] != digest:
            raise Refused(f"{name} in {folder} is not that of run {record.run_id}; use the folder it was started with")
