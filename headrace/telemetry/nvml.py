"""What NVIDIA's management library says of a device, where the package `pynvml` and a driver are there."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Readings:
    sm: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    used: int = 0


class Sampler:
    """Samples the utilisation of devices by their UUID, and says the means. Of one thread at a time."""

    def __init__(self) -> None:
        self._library: Any = None
        self._missing = False
        self._handles: dict[str, Any] = {}
        self._readings: dict[str, _Readings] = {}

    def sample(self, uuid: str) -> None:
        """Read one device now. Nothing where the library, or the device in it, is missing."""
        if self._missing or not self._begin():
            return
        library = self._library
        try:
            handle = self._handles.get(uuid)
            if handle is None:
                handle = self._handles[uuid] = library.nvmlDeviceGetHandleByUUID(uuid)
            rates, memory = library.nvmlDeviceGetUtilizationRates(handle), library.nvmlDeviceGetMemoryInfo(handle)
        except library.NVMLError as error:
            log.info("NVML does not say how device %s is used: %s", uuid, error)
            self._missing = True
            return
        readings = self._readings.setdefault(uuid, _Readings())
        readings.sm.append(rates.gpu / 100)
        readings.memory.append(rates.memory / 100)
        readings.used = int(memory.used)

    def take(self, uuid: str) -> dict[str, float]:
        """Means since the last call: "sm" and "memory" from 0 to 1, and the bytes in use; empty without a sample."""
        readings = self._readings.pop(uuid, None)
        if readings is None:
            return {}
        count = len(readings.sm)
        return {
            "sm": round(sum(readings.sm) / count, 4),
            "memory": round(sum(readings.memory) / count, 4),
            "memory_bytes": readings.used,
        }

    def close(self) -> None:
        if self._library is not None:
            self._library.nvmlShutdown()
            self._library = None
        self._missing = True

    def _begin(self) -> bool:
        if self._library is not None:
            return True
        if importlib.util.find_spec("pynvml") is None:
            self._missing = True
            return False
        library = importlib.import_module("pynvml")
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            log.info("NVML is not there: %s", error)
            self._missing = True
            return False
        self._library = library
        return True
