"""The load that an engine is measured under, with the scripted engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from audit.portability_rates import in_flight, part_rates
from deploy.asked import asked
from deploy.portability import Wish, _asking, hold, measure
from headrace.errors import ConfigError, EngineError
from producers.chat import ByteChat
from producers.engines.api import Request, SamplingParams
from producers.engines.scripted import ScriptedEngine
from producers.solo import FIRST
from tests.support import wait_until

LONG = {"length_mean": 1e6, "length_sigma": 0.0}
"""All completions are as long as asked for."""


class Asking:
    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, length: int) -> Request:
        self.lengths.append(length)
        return Request(f"r{len(self.lengths)}", np.arange(4, dtype=np.int32), SamplingParams(length))


async def started(step_s: float, slots: int) -> ScriptedEngine:
    engine = ScriptedEngine(slots=slots, context_length=64, step_s=step_s, **LONG)  # type: ignore[arg-type]
    await engine.start()
    await engine.commit(FIRST)
    return engine


async def test_the_load_is_as_large_as_asked_and_never_in_step() -> None:
    engine, ask = await started(0.002, 4), Asking()
    pieces, begin, end = await hold(engine, ask, 4, 8, 0.25)
    assert end - begin == pytest.approx(0.25)
    assert ask.lengths[:4] == [2, 4, 6, 8]
    assert set(ask.lengths[4:]) == {8}
    assert 2 < in_flight(pieces, begin, end) <= 4.001
    # A step takes 2 ms at least, and gives each slot a token.
    assert 0 < max(part_rates(pieces, begin, end, 2)) <= 1.05 * 4 / 0.002
    await asyncio.sleep(0)
    assert engine.stats().busy_slots == 0
    await engine.close()


async def test_what_was_begun_in_time_is_waited_for() -> None:
    engine, ask = await started(0.01, 2), Asking()
    pieces, begin, end = await hold(engine, ask, 2, 32, 0.2)
    assert sum(piece.end >= end for piece in pieces) >= 2
    assert in_flight(pieces, begin, end) > 1
    await engine.close()


async def test_a_request_that_is_given_up_ends_the_measurement() -> None:
    engine, ask = await started(0.01, 2), Asking()
    load = asyncio.create_task(hold(engine, ask, 2, 32, 60.0))
    await wait_until(lambda: engine.stats().busy_slots == 2, "both requests decode")
    engine.abort("r2")
    with pytest.raises(EngineError, match="gave up a request of the measurement"):
        await load
    await engine.close()


def wish(**changes: object) -> Wish:
    config = asked(None, ["producer.engine_options={length_mean=1000.0, length_sigma=0.0, step_s=0.001}"], None, (),
                   producer__engine="scripted")  # fmt: skip
    fields = {"config": config, "batches": (2, 4), "lengths": (4, 8), "prompt_tokens": 8, "seconds": 0.1}
    return Wish(**{**fields, **changes})  # type: ignore[arg-type]


def test_each_length_is_measured_alone_and_at_each_batch() -> None:
    said: list[str] = []
    record = measure(wish(label="a\x1b[2J"), said.append)
    assert [(rate.completion_tokens, rate.batch) for rate in record.single] == [(4, 1), (8, 1)]
    assert [(rate.completion_tokens, rate.batch) for rate in record.sustained] == [(4, 2), (4, 4), (8, 2), (8, 4)]
    assert [rate.mean_tokens for rate in record.sustained] == [4, 4, 8, 8]
    assert record.label == "a\\x1b[2J"
    assert record.traits.paged_cache.has is None
    assert len(said) == 6
    assert said[0].startswith("4 tokens, one request: ")


def test_prompts_differ_in_the_order_of_their_tokens() -> None:
    ask = _asking(wish(prompt_tokens=40), ByteChat())
    one, other = ask(4), ask(4)
    assert one.request_id != other.request_id
    assert len(one.prompt_ids_P) == 40
    assert sorted(one.prompt_ids_P) == sorted(other.prompt_ids_P)
    assert list(one.prompt_ids_P) != list(other.prompt_ids_P)


def test_an_engine_without_room_is_refused(tiny_model: Path) -> None:
    config = asked(None, (), None, (), model__path=str(tiny_model), producer__engine="tests.portability:small_engine")
    with pytest.raises(ConfigError, match="--batch 9: the engine computes 2 requests at once; lower it"):
        measure(wish(config=config, batches=(9,)), print)
    with pytest.raises(ConfigError, match="--prompt 60 and --length 8: together they may have 32 tokens"):
        measure(wish(config=config, batches=(2,), prompt_tokens=60), print)
