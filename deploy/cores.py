"""Which CPU cores each torch process of a local run has to itself.

Two numeric processes whose threads share a core slow each other down far more than by half, so either every one
has cores of its own, or the kernel is left to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headrace.config import Config


class Cores:
    """The cores of this machine, handed out and taken back."""

    def __init__(self, available: Iterable[int], *, shared: bool = False) -> None:
        """An empty `available` pins nothing; those that are `shared` everybody gets."""
        self._free = sorted(available)
        self._shared = shared
        self._held: dict[str, frozenset[int]] = {}

    @classmethod
    def for_run(cls, config: Config, available: Iterable[int], *, gpu: bool) -> Cores:
        """Pins when all torch processes of the run's start find cores of their own, and compute on the CPU."""
        cores = sorted(available)
        on_cpu = config.model.device == "cpu" or (config.model.device == "auto" and not gpu)
        if config.run.placement != "disaggregated":
            # One device: the cores that the one with more threads needs.
            return cls(cores[: max(config.trainer.threads, config.producer.threads)] if on_cpu else (), shared=True)
        needed = config.trainer.ranks * config.trainer.threads + config.producer.count * config.producer.threads
        return cls(cores if on_cpu and needed <= len(cores) else ())

    def take(self, name: str, count: int) -> frozenset[int] | None:
        """Cores for this process (the same again for one that is replaced); None when too few are free."""
        if name in self._held:
            return self._held[name]
        if count > len(self._free):
            return None
        if self._shared:
            return frozenset(self._free)
        self._held[name] = frozenset(self._free[:count])
        self._free = self._free[count:]
        return self._held[name]

    def give_back(self, name: str) -> None:
        """A process is gone for good."""
        self._free = sorted([*self._free, *self._held.pop(name, frozenset())])


def has_gpu() -> bool:
    """Whether the kernel shows a GPU that torch could use, told without importing torch."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
