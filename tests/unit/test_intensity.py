"""What a device was measured to reach: once, and again where nobody knows it any more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrace.policy import intensity
from headrace.policy.intensity import measured, observe
from headrace.telemetry.arithmetic import Roofline
from headrace.telemetry.phases import Lane


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(intensity, "SIDE", 128)
    monkeypatch.setattr(intensity, "COPIED", 1 << 16)
    return tmp_path / "cache" / "roofline.json"


def test_a_device_is_measured_once_for_each_type_and_number_of_threads(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measured("cpu", "float32")
    assert first.flop_per_s > 1e6
    assert first.bytes_per_s > 1e6
    monkeypatch.setattr(intensity, "_flop_per_s", lambda device, dtype: 7.0)
    assert measured("cpu", "float32") == first
    assert measured("cpu", "bfloat16").flop_per_s == 7.0
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert measured("cpu", "float32").flop_per_s == 7.0
    finally:
        torch.set_num_threads(threads)
    assert len(json.loads(cache.read_text())) == 3


@pytest.mark.parametrize("garbage", ["", "[]", '{"a": 1}', '{"a": {"flop_per_s": 1}}', "{"])
def test_a_cache_that_cannot_be_read_is_measured_anew(cache: Path, garbage: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(garbage)
    assert isinstance(measured("cpu", "float32"), Roofline)
    assert len(json.loads(cache.read_text())) == 1


def test_without_room_for_a_cache_it_is_measured_all_the_same(cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    assert measured("cpu", "float32").flop_per_s > 0


def test_nothing_is_marked_on_a_cpu() -> None:
    lane = Lane("engine", "start")
    observe(lane, "cpu")
    assert (lane.mark, lane.place.uuid) == (None, "")
