"""NVML's figures, from a library that stands in for the one that needs a driver."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace

import pytest

from headrace.telemetry.nvml import Sampler


class NVMLError(Exception):
    pass


class Library(ModuleType):
    """As `pynvml` answers, for one device."""

    NVMLError = NVMLError

    def __init__(self, *, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.__spec__ = importlib.machinery.ModuleSpec("pynvml", None)
        self.driver, self.busy, self.shut = driver, [50, 100], 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        self.shut += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=self.busy.pop(0), memory=25)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=1 << 30)


def test_means_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    sampler = Sampler()
    sampler.sample("GPU-1")
    sampler.sample("GPU-1")
    assert sampler.take("GPU-1") == {"sm": 0.75, "memory": 0.25, "memory_bytes": 1 << 30}
    assert sampler.take("GPU-1") == {}
    sampler.close()
    assert library.shut == 1


@pytest.mark.parametrize("driver", [True, False])
def test_a_device_or_a_driver_that_is_missing_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, driver: bool
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Library(driver=driver))
    sampler = Sampler()
    with caplog.at_level("INFO"):
        sampler.sample("GPU-2")
        sampler.sample("GPU-2")
    assert len(caplog.records) == 1
    assert sampler.take("GPU-2") == {}


def test_without_the_package_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sampler = Sampler()
    sampler.sample("GPU-1")
    assert sampler.take("GPU-1") == {}
