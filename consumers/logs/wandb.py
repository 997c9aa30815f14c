"""Weights & Biases: one run of the same id. Offline it is a folder of the run, which `wandb sync` uploads later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from headrace.config import LogsConfig

KINDS = ("train", "evaluation")


class WeightsAndBiases:
    def __init__(self, config: LogsConfig, run_id: str, folder: Path, tree: Mapping[str, Any]) -> None:
        """Raises wandb's own errors; the key comes from its own places (`WANDB_API_KEY`, `wandb login`)."""
        online = config.wandb_mode == "online"
        self._run = wandb.init(
            project=config.wandb_project,
            entity=config.wandb_entity or None,
            id=run_id,
            name=run_id,
            dir=folder,
            mode=config.wandb_mode,
            # A trainer that goes on with the run logs on; offline each has a folder, and `wandb sync` joins them.
            resume="allow" if online else None,
            config=dict(tree),
            settings=wandb.Settings(console="off", disable_code=True, disable_git=True, silent=True),
        )
        for kind in KINDS:
            # An evaluation may come after later steps.
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        named = {f"{kind}/{name}": value for name, value in figures.items()}
        self._run.log({**named, f"{kind}/step": step})

    def close(self) -> None:
        self._run.finish()


def open_logger(config: LogsConfig, run_id: str, folder: Path, tree: Mapping[str, Any]) -> WeightsAndBiases:
    return WeightsAndBiases(config, run_id, folder, tree)
