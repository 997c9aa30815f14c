"""The least memory that trainer and engines of one device need, by arithmetic, and whether it is there.

Weights, moments, gradients, the cache of keys and values at full slots, and what a step keeps of its activations: what
a layer's products read, as in Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), without attention's scores and
logits, which exist in pieces. Allocators and kernels take more: what does not fit by this does not fit.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from headrace.config import Config
from headrace.errors import ConfigError, ModelError
from headrace.telemetry.arithmetic import Shape

ITEMSIZE = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
MASTER, MOMENTS, GRADIENT = 4, 8, 4
"""Bytes per parameter that a trainer has."""
LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes."""

    trainer: int
    """Weights and optimizer, and the reference model: always there."""
    step: int
    """Gradients and activations: while it trains."""
    engines: int
    """Their weights, and those that they stage."""
    cache: int
    """Keys and values of one engine."""
    segments: int = 0
    """Published versions, where shared memory is the device's."""
    producers: int = 1

    def needed(self, placement: str) -> int:
        """At the moment at which it is most. In turns, a step and a cache are never there together."""
        always = self.trainer + self.engines + self.segments
        if placement == "colocated":
            return always + max(self.step, self.cache)
        return always + self.step + self.producers * self.cache


def footprint(config: Config, shape: Shape, hidden: int, intermediate: int, device: str) -> Footprint:
    """Of the run's start, with as many producers as it has then."""
    trainer, count = config.trainer, config.producer.count
    computed = 4 if trainer.autocast == "off" else 2
    kept = hidden if trainer.activation_checkpointing else 8 * hidden + 4 * intermediate
    on_cpu = device == "cpu"
    modelless = config.producer.engine == "scripted"
    reference = MASTER if trainer.kl_coefficient else 0
    itemsize = ITEMSIZE[config.model.dtype]
    return Footprint(
        trainer=(MASTER + MOMENTS + reference) * shape.parameters,
        step=GRADIENT * shape.parameters + computed * kept * shape.layers * trainer.token_budget,
        engines=0 if modelless else 2 * itemsize * shape.parameters * count,
        cache=0 if modelless else round(shape.kv_bytes(config.producer.slots * config.model.context_length, itemsize)),
        segments=config.weights.max_live_versions * ITEMSIZE[config.model.wire_dtype] * shape.parameters * on_cpu,
        producers=count,
    )


def check_memory(config: Config, folder: Path, device: str) -> None:
    """Of a run whose trainer and engines share `device`. Raises ConfigError where they do not fit, ModelError."""
    placement = config.run.placement
    if placement == "disaggregated":
        return
    model = _empty(folder)
    text = model.config.get_text_config()
    parameters = sum(one.numel() for one in model.parameters())
    shape = Shape.of(text, parameters, model.get_input_embeddings().weight.numel())
    intermediate = int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    need = footprint(config, shape, int(text.hidden_size), intermediate, device)
    there = available(device)
    if need.needed(placement) > there:
        raise ConfigError(refusal(need, placement, device, there))


def refusal(need: Footprint, placement: str, device: str, there: int) -> str:
    parts = {
        "weights and optimizer of the trainer": need.trainer,
        "its step": need.step,
        "weights of the engines": need.engines,
        "keys and values": need.cache * (1 if placement == "colocated" else need.producers),
        "published versions": need.segments,
    }
    shown = ", ".join(f"{what} {_gb(size)}" for what, size in parts.items() if size)
    turns = " (keys and values are never there with a step)" if placement == "colocated" else ""
    other = 'run.placement = "colocated", which needs less, or ' if placement == "hybrid" else ""
    return (
        f"run.placement: {placement!r} needs at least {_gb(need.needed(placement))} on {device}, which has "
        f"{_gb(there)} left: {shown}{turns}; take {other}less of producer.slots, model.context_length or "
        "trainer.token_budget, a smaller model, or devices for each"
    )


def available(device: str) -> int:
    """Bytes of the device that nobody uses. Raises ModelError for a GPU that is not there."""
    if device.startswith("cuda"):
        import torch

        try:
            return int(torch.cuda.mem_get_info(device)[0])
        except (RuntimeError, AssertionError, ValueError) as error:
            raise ModelError(f"model.device = {device!r} does not say how much memory it has: {error}") from error
    return min(int(psutil.virtual_memory().available), _limit())


def _limit() -> int:
    """Of a container's memory; without one any amount."""
    with suppress(OSError, ValueError):
        return int(LIMIT.read_text(encoding="ascii"))
    return 1 << 62


def _empty(folder: Path) -> Any:
    """The model without its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model folder {folder} has no config that loads: {error}") from error


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
