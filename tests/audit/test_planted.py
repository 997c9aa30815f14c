"""Real runs with a bottleneck that was put there: the audit names it, from what the run's services recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from audit.analysis import Audit
from audit.levers import LEVER_OF
from tests.audit.planted import BEHIND_WIRE, PAUSED_OPTIMIZER, SLOWER_ENGINE, Planted, config
from tests.audit.slow import SlowWire
from tests.tiny import save_tiny_llama


def named(found: Audit, bottleneck: str) -> None:
    told = found.bottleneck, found.path_s, found.rates
    assert found.bottleneck.name == bottleneck, told
    assert found.levers[0].name == LEVER_OF[bottleneck], told
    begin, end = found.run.window
    assert sum(found.path_s.values()) == pytest.approx(end - begin, rel=1e-3)


async def test_slow_reward(planted: Planted, tiny_model: Path) -> None:
    environments = [{"name": "tests/audit/slow.py:Sums", "label": "sums", "options": {"score_s": 0.05}}]
    await planted.begin(config(tiny_model, environments=environments, run={"steps": 10}))
    for module, name in (("consumers", "trainer"), ("weightsync", "weights"), ("producers", "producer-1")):
        planted.start(module, name)
    wait = await planted.waiting("trainer", "groups")
    assert wait.whom == "producer-1"
    assert wait.for_s is not None
    assert wait.ids[0].startswith("task train-0000")
    named(await planted.to_its_end(), "reward")


async def test_a_straggling_producer(planted: Planted, tiny_model: Path) -> None:
    await planted.begin(config(tiny_model, staleness={"max_lag": 1}, run={"steps": 10}))
    planted.start("consumers", "trainer")
    planted.start("weightsync", "weights")
    planted.start("producers", "producer-1")
    planted.start("producers", "producer-2", SLOWER_ENGINE.format(factor=8))
    found = await planted.to_its_end()
    named(found, "straggler")
    assert found.bottleneck.subject == "producer-2"


@pytest.fixture
async def slow_wire(tmp_path: Path) -> AsyncIterator[SlowWire]:
    wire = SlowWire(250e3, tmp_path / "address")
    await wire.start()
    yield wire
    await wire.close()


async def test_a_slow_link_to_the_weight_service(planted: Planted, tiny_model: Path, slow_wire: SlowWire) -> None:
    await planted.begin(config(tiny_model, staleness={"max_lag": 1}, run={"steps": 8}))
    planted.start("consumers", "trainer", HEADRACE_HOST="a")
    wire = BEHIND_WIRE.format(file=str(slow_wire.file), port=slow_wire.port)
    planted.start("weightsync", "weights", wire, HEADRACE_HOST="a")
    memory = planted.run_folder.parent / "b"
    memory.mkdir()
    planted.start("producers", "producer-1", HEADRACE_HOST="b", HEADRACE_SHM_DIR=str(memory))
    named(await planted.to_its_end(), "weight_sync")


async def test_too_few_producers(planted: Planted, tiny_model: Path) -> None:
    producer = {"slots": 4, "engine_options": {"length_mean": 16.0, "length_sigma": 0.1, "step_s": 0.02}}
    await planted.begin(config(tiny_model, producer=producer))
    for module, name in (("consumers", "trainer"), ("weightsync", "weights"), ("producers", "producer-1")):
        planted.start(module, name)
    found = await planted.to_its_end()
    named(found, "too_few_producers")
    assert found.split is not None
    assert found.split.recommended.producers > 1


async def test_too_many_producers(planted: Planted, tiny_model: Path) -> None:
    await planted.begin(config(tiny_model))
    planted.start("consumers", "trainer", PAUSED_OPTIMIZER.format(seconds=0.4))
    planted.start("weightsync", "weights")
    for number in (1, 2, 3):
        planted.start("producers", f"producer-{number}")
    found = await planted.to_its_end()
    named(found, "too_many_producers")
    assert found.split is not None
    assert found.split.recommended.producers == 1


async def test_a_large_checkpoint(planted: Planted, tmp_path: Path) -> None:
    large = {"hidden_size": 256, "intermediate_size": 8192, "num_hidden_layers": 2}
    model = save_tiny_llama(tmp_path / "large", **large)
    brief = {"engine_options": {"length_mean": 4.0, "length_sigma": 0.1, "step_s": 0.01}}
    few = {"groups_per_step": 1, "group_size": 4}
    await planted.begin(config(model, checkpoint={"every": 1}, run={"steps": 6}, producer=brief, trainer=few))
    for module, name in (("consumers", "trainer"), ("weightsync", "weights"), ("producers", "producer-1")):
        planted.start(module, name)
    named(await planted.to_its_end(), "checkpoint")


async def test_no_lag_at_all(planted: Planted, tiny_model: Path) -> None:
    await planted.begin(config(tiny_model, staleness={"max_lag": 0}))
    planted.start("consumers", "trainer", PAUSED_OPTIMIZER.format(seconds=0.2))
    planted.start("weightsync", "weights")
    planted.start("producers", "producer-1")
    named(await planted.to_its_end(), "staleness_bound")
