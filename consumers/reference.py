"""The reference model of the KL penalty: loaded once, frozen."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.config_trainer import INITIAL
from headrace.errors import ConfigError
from headrace.policy.loading import load_model, model_digests
from headrace.policy.prepare import resolve_model

log = logging.getLogger(__name__)


def load_reference(config: Config, model_folder: Path, digests: Mapping[str, str], device: str) -> Any:
    """In float32, as the policy is: both differ by their weights alone. None where no penalty asks for one.

    Raises as `reference_folder` does, and ModelError when it does not load.
    """
    folder = reference_folder(config, model_folder, digests)
    if folder is None:
        return None
    log.info("the reference model is %s", folder)
    return load_model(folder, "float32", device).requires_grad_(False)


def reference_folder(config: Config, model_folder: Path, digests: Mapping[str, str]) -> Path | None:
    """Where it lies; None where no penalty asks for one. `model_folder` and `digests` are of the run's model.

    Raises ModelError for a folder that is not there, ConfigError for a model of another tokenizer: its log-probs would
    be of other tokens.
    """
    named = config.trainer.reference
    if not config.trainer.kl_coefficient:
        return None
    folder = model_folder if named == INITIAL else resolve_model(named, "trainer.reference")
    if model_digests(folder)["tokenizer"] != digests.get("tokenizer", ""):
        raise ConfigError(
            f"trainer.reference = {named!r} has another tokenizer than the run's model; name one of the same, or "
            f'"{INITIAL}" for the model that the run begins with'
        )
    return folder
