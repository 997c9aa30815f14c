"""What every engine does, whichever it is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from headrace.config import Config
from headrace.errors import ConfigError, EngineError
from headrace.version import PolicyVersion
from producers.engines.api import Completion, Engine, Progress, Request, SamplingParams, SharesDevice, TellsProgress
from producers.engines.registry import build_engine
from producers.engines.torch_engine import TorchEngine
from tests.tiny import tiny_llama
from weightsync.manifest import Layout

FIRST, SECOND = PolicyVersion(1, 0), PolicyVersion(1, 1)
VOCABULARY = 96
SLOTS = 3


def scripted(folder: Path, **options: object) -> Engine:
    config = Config.model_validate(
        {
            "model": {"context_length": 64},
            "producer": {"slots": SLOTS, "engine_options": {"vocabulary": VOCABULARY, "length_mean": 400.0, **options}},
            "trainer": {"group_size": 2},
            "sampling": {"max_new_tokens": 8},
        }
    )
    return build_engine("scripted", config, folder, seed=5)


def embedded(folder: Path, **options: Any) -> Engine:
    tiny_llama(vocab_size=VOCABULARY, initializer_range=0.2).save_pretrained(folder)
    return TorchEngine(folder, slots=SLOTS, context_length=64, dtype="float32", device="cpu", seed=5, **options)


ENGINES: dict[str, Callable[..., Engine]] = {"scripted": scripted, "torch": embedded}


@pytest_asyncio.fixture(params=sorted(ENGINES))
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Engine]:
    made = ENGINES[request.param](tmp_path)
    await made.start()
    await made.commit(FIRST)
    yield made
    await made.close()


def ask(name: str, prompt: int = 5, **sampling: object) -> Request:
    prompt_ids = np.arange(1, prompt + 1, dtype=np.int32)
    return Request(name, prompt_ids, SamplingParams(**{"max_new_tokens": 6, "seed": 1, **sampling}))  # type: ignore[arg-type]


async def until(predicate: Callable[[], bool], what: str) -> None:
    async def poll() -> None:
        while not predicate():  # noqa: ASYNC110 - an engine wakes nobody between two tokens
            await asyncio.sleep(0)

    try:
        await asyncio.wait_for(poll(), 30)
    except TimeoutError:
        pytest.fail(f"waited 30 s for: {what}")


async def both(*calls: Awaitable[Completion]) -> list[Completion]:
    return await asyncio.gather(*calls)


async def test_a_completion_is_whole(engine: Engine) -> None:
    done = await engine.generate(ask("a"))
    assert done.request_id == "a"
    assert done.finish_reason == "length"
    assert done.token_ids_N.dtype == np.int32
    assert done.logprobs_N.dtype == np.float32
    assert len(done.token_ids_N) == len(done.logprobs_N) == 6
    assert ((done.token_ids_N >= 0) & (done.token_ids_N < VOCABULARY)).all()
    assert ((done.logprobs_N <= 0) & np.isfinite(done.logprobs_N)).all()
    assert [(span.start, span.end, span.version, span.kv) for span in done.spans] == [(0, 6, FIRST, "fresh")]
    assert done.queue_s >= 0
    assert done.decode_s >= 0


async def test_a_seed_fixes_the_tokens_whatever_else_runs(engine: Engine) -> None:
    alone = await engine.generate(ask("a", seed=3))
    crowd = await both(*(engine.generate(ask(f"b{i}", prompt=3 + i, seed=3 if i == 4 else i + 10)) for i in range(4)))
    again, *_ = await both(
        engine.generate(ask("c", seed=3)), *(engine.generate(ask(f"d{i}", seed=i)) for i in range(4))
    )
    assert again.token_ids_N.tolist() == alone.token_ids_N.tolist()
    assert np.allclose(again.logprobs_N, alone.logprobs_N, atol=1e-4)
    assert any(other.token_ids_N.tolist() != alone.token_ids_N.tolist() for other in crowd)


async def test_without_a_seed_requests_differ(engine: Engine) -> None:
    done = await both(*(engine.generate(ask(f"a{i}", seed=None, max_new_tokens=20)) for i in range(3)))
    assert len({tuple(one.token_ids_N.tolist()) for one in done}) == 3


async def test_more_requests_than_slots_are_all_served(engine: Engine) -> None:
    calls = [engine.generate(ask(f"r{i}", prompt=2 + i % 5, max_new_tokens=1 + i % 7)) for i in range(4 * SLOTS)]
    done = await both(*calls)
    assert [len(one.token_ids_N) for one in done] == [1 + i % 7 for i in range(4 * SLOTS)]
    stats = engine.stats()
    assert stats.slots == engine.slots == SLOTS
    assert stats.decoded_tokens == sum(1 + i % 7 for i in range(4 * SLOTS))
    assert stats.busy_slot_steps <= stats.decode_steps * SLOTS
    assert stats.busy_slots == stats.waiting == 0


async def test_a_stop_token_ends_and_is_included(engine: Engine) -> None:
    free = await engine.generate(ask("a", max_new_tokens=12))
    stop = int(free.token_ids_N[4])
    first = free.token_ids_N.tolist().index(stop)
    done = await engine.generate(ask("b", max_new_tokens=12, stop_token_ids=(stop,)))
    assert done.finish_reason == "stop"
    assert done.token_ids_N.tolist() == free.token_ids_N.tolist()[: first + 1]


async def test_the_context_is_a_limit(engine: Engine) -> None:
    done = await engine.generate(ask("a", prompt=engine.context_length - 3, max_new_tokens=50))
    assert len(done.token_ids_N) == 3
    assert done.finish_reason == "length"
    full = await engine.generate(ask("b", prompt=engine.context_length, max_new_tokens=50))
    assert (len(full.token_ids_N), full.finish_reason, full.spans) == (0, "length", ())


async def test_abort_returns_what_there_is(engine: Engine) -> None:
    running = [asyncio.create_task(engine.generate(ask(f"r{i}", max_new_tokens=55))) for i in range(SLOTS)]
    waiting = asyncio.create_task(engine.generate(ask("w", max_new_tokens=55)))
    steps = engine.stats().decode_steps
    await until(lambda: engine.stats().decode_steps >= steps + 3, "three decode steps")
    engine.abort("w")
    engine.abort("r0")
    engine.abort("nobody")
    aborted, never, *rest = await both(running[0], waiting, *running[1:])
    assert aborted.finish_reason == never.finish_reason == "abort"
    assert 0 < len(aborted.token_ids_N) < 55
    assert aborted.spans[-1].end == len(aborted.token_ids_N)
    assert (len(never.token_ids_N), never.spans) == (0, ())
    assert [len(one.token_ids_N) for one in rest] == [55] * (SLOTS - 1)


async def test_open_requests_tell_how_far_they_are(engine: Engine) -> None:
    assert isinstance(engine, TellsProgress)
    running = [asyncio.create_task(engine.generate(ask(f"r{i}", max_new_tokens=55))) for i in range(SLOTS)]
    waiting = asyncio.create_task(engine.generate(ask("w", max_new_tokens=55)))
    steps = engine.stats().decode_steps
    await until(lambda: engine.stats().decode_steps >= steps + 3, "three decode steps")
    before = engine.progress("r0")
    await engine.commit(SECOND)
    after = engine.progress("r0")
    assert before is not None
    assert after is not None
    assert 0 < before.sampled <= after.sampled <= 55
    assert before.oldest == after.oldest == FIRST
    assert engine.progress("w") == Progress(0, None)
    assert engine.progress("nobody") is None
    done, last, *_ = await both(running[0], waiting, *running[1:])
    assert engine.progress("r0") is None
    assert (done.spans[0].version, last.spans[0].version) == (FIRST, SECOND)


async def test_a_cancelled_generate_frees_its_slot(engine: Engine) -> None:
    tasks = [asyncio.create_task(engine.generate(ask(f"r{i}", max_new_tokens=55))) for i in range(SLOTS + 1)]
    await until(lambda: engine.stats().busy_slots == SLOTS, "all slots busy")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: engine.stats().busy_slots == 0, "slots free again")
    assert engine.stats().waiting == 0


async def test_a_commit_in_the_middle_splits_the_spans(engine: Engine) -> None:
    old = asyncio.create_task(engine.generate(ask("a", max_new_tokens=55)))
    steps = engine.stats().decode_steps
    await until(lambda: engine.stats().decode_steps >= steps + 3, "three decode steps")
    still = await engine.commit(SECOND)
    assert still >= 0
    assert engine.version == SECOND
    new = await engine.generate(ask("b"))
    done = await old
    assert [(span.version, span.kv) for span in done.spans] == [(FIRST, "fresh"), (SECOND, "kept")]
    assert done.spans[0].start == 0
    assert 0 < done.spans[0].end == done.spans[1].start < done.spans[1].end == 55
    assert [(span.version, span.kv) for span in new.spans] == [(SECOND, "fresh")]


@pytest.mark.parametrize("name", sorted(ENGINES))
async def test_a_commit_may_have_keys_and_values_recomputed(name: str, tmp_path: Path) -> None:
    engine = ENGINES[name](tmp_path, kv="recompute")
    await engine.start()
    await engine.commit(FIRST)
    old = asyncio.create_task(engine.generate(ask("a", max_new_tokens=55)))
    await until(lambda: engine.stats().decode_steps >= 3, "three decode steps")
    await engine.commit(FIRST)  # nothing new: nothing is outdated
    await engine.commit(SECOND)
    done = await old
    assert [(span.version, span.kv) for span in done.spans] == [(FIRST, "fresh"), (SECOND, "fresh")]
    assert 0 < done.spans[0].end == done.spans[1].start < done.spans[1].end == 55
    stats = engine.stats()
    # All but the newest token, which would have been decoded anyway.
    assert (stats.prefill_tokens, stats.recomputed_tokens) == (5, 5 + done.spans[0].end - 1)
    assert stats.decoded_tokens == 55
    await engine.close()


async def test_a_commit_keeps_keys_and_values_by_default(engine: Engine) -> None:
    done = asyncio.create_task(engine.generate(ask("a", max_new_tokens=55)))
    await until(lambda: engine.stats().decode_steps >= 3, "three decode steps")
    await engine.commit(SECOND)
    await done
    assert (engine.stats().prefill_tokens, engine.stats().recomputed_tokens) == (5, 0)


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_what_becomes_of_the_cache_is_one_of_two(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='kv = \'drop\' is not known; set it to "keep" or "recompute"'):
        ENGINES[name](tmp_path, kv="drop")


async def test_close_ends_everything_with_abort(engine: Engine) -> None:
    tasks = [asyncio.create_task(engine.generate(ask(f"r{i}", max_new_tokens=55))) for i in range(SLOTS + 2)]
    await until(lambda: engine.stats().busy_slots == SLOTS, "all slots busy")
    await engine.close()
    await engine.close()
    assert {done.finish_reason for done in await both(*tasks)} == {"abort"}
    with pytest.raises(EngineError):
        await engine.generate(ask("late"))


async def test_phases_wait_when_there_is_nothing_to_do(engine: Engine) -> None:
    await engine.generate(ask("a"))
    lane = engine.lane  # type: ignore[attr-defined]
    await until(lambda: lane.phase == "wait_start", "the engine waits for tasks")
    assert lane.seconds()["decode"] > 0
    assert math.isclose(sum(lane.seconds().values()), lane.wall(), rel_tol=0.5)


async def test_nothing_is_sampled_before_a_version_is_there(tmp_path: Path) -> None:
    for make in ENGINES.values():
        made = make(tmp_path)
        await made.start()
        assert made.version is None
        with pytest.raises(EngineError, match="no policy version"):
            await made.generate(ask("a"))
        await made.close()


async def test_the_scripted_engine_stages_any_layout(tmp_path: Path) -> None:
    made = scripted(tmp_path)
    layout = Layout.of([("w", "bfloat16", (3, 5)), ("b", "float32", (7,))])
    buffer = made.back_buffer(layout)
    assert (buffer.nbytes, buffer.dtype) == (layout.nbytes, np.uint8)
    buffer[:] = 1


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("warp", {}, "not one of openai, scripted, sglang, torch"),
        ("scripted", {"speed": 9}, "speed"),
        ("no.such.module:engine", {}, "does not import"),
        ("producers.engines.scripted:Nothing", {}, "has no object 'Nothing'"),
        ("producers.engines.scripted:__doc__", {}, "not a function"),
    ],
)
def test_an_engine_that_cannot_be_built_is_named(name: str, options: dict[str, object], sentence: str) -> None:
    config = Config.model_validate({"producer": {"engine": name, "engine_options": options}})
    with pytest.raises(ConfigError, match=sentence) as caught:
        build_engine(name, config, Path(), seed=0)
    assert repr(name) in str(caught.value)


def test_an_engine_of_ones_own_is_built_by_name(tmp_path: Path) -> None:
    config = Config()
    assert build_engine("producers.engines.registry:_scripted", config, tmp_path, seed=0).slots == config.producer.slots


async def test_between_its_turns_it_begins_nothing_and_loses_nothing(engine: Engine) -> None:
    assert isinstance(engine, SharesDevice)
    alone = await engine.generate(ask("before", max_new_tokens=8))
    started = [asyncio.create_task(engine.generate(ask(f"r{n}", max_new_tokens=8))) for n in range(2 * SLOTS)]
    await until(lambda: engine.stats().busy_slots == SLOTS, "all slots are full")
    await engine.release()
    await asyncio.sleep(0)
    ended = [task for task in started if task.done()]
    assert len(ended) >= SLOTS
    before = engine.stats()
    assert before.busy_slots == 0
    later = asyncio.create_task(engine.generate(ask("later", max_new_tokens=8)))
    await engine.release()
    await engine.commit(SECOND)
    assert engine.version == SECOND
    await until(lambda: engine.stats().waiting == 2 * SLOTS - len(ended) + 1, "the others wait")
    assert engine.stats().decode_steps == before.decode_steps
    engine.resume()
    done = [*await both(*started), await later]
    assert [len(one.token_ids_N) for one in done] == [8] * len(done)
    assert {one.spans[-1].version for one in done} == {FIRST, SECOND}
    # The seed is of the request, and both versions are of the same weights.
    assert (done[-1].token_ids_N == alone.token_ids_N).all()


async def test_an_engine_that_is_closed_has_no_turn_to_end(engine: Engine) -> None:
    assert isinstance(engine, SharesDevice)
    open_call = asyncio.create_task(engine.generate(ask("a", max_new_tokens=8)))
    await until(lambda: engine.stats().busy_slots == 1, "it decodes")
    releasing = asyncio.create_task(engine.release())
    await asyncio.sleep(0)
    await engine.close()
    await asyncio.wait([releasing, open_call])
    with pytest.raises(EngineError):
        await engine.release()
