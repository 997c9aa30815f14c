"""Two servers that the engine starts itself: groups meet at one, a server killed in mid-update is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from headrace.version import PolicyVersion
from producers.engines.remote.options import parsed
from producers.engines.sglang.engine import SglangEngine
from producers.engines.sglang.options import Options
from producers.engines.sglang.replica import SglangReplica
from tests.living import living
from tests.remote_engines import FIRST, PROMPT, SECOND, apart, ask, letters, scored, stage
from tests.sglang_servers import tiny_spec
from tests.support import wait_until
from tests.tiny import tiny_llama

pytestmark = pytest.mark.timeout(900)
"""It starts three servers, each for a minute where others use the machine."""


def pid_of(replica: SglangReplica) -> int:
    server = replica._place._server
    assert server is not None
    return server.pid


def group_of(pid: int) -> list[psutil.Process]:
    """Living processes that were started with a server."""
    return living(lambda process: os.getpgid(process.pid) == pid)


async def members_share_their_prompt(engine: SglangEngine) -> None:
    """The others of a group find its prompt at the server that has computed it for the first."""
    prompts = {f"s{number}": tuple(range(50 + number, 150 + number)) for number in range(6)}
    await asyncio.gather(*(engine.generate(ask(f"{name}/0/0", prompt=one)) for name, one in prompts.items()))
    before = engine.stats().prefill_tokens
    assert before >= 600
    await asyncio.gather(*(engine.generate(ask(f"{name}/1/0", prompt=one)) for name, one in prompts.items()))
    assert engine.stats().prefill_tokens - before == 6


async def test_a_server_killed_in_mid_update_is_replaced_and_loses_no_request(
    sglang_model: Path, tmp_path: Path
) -> None:
    spec = tiny_spec(sglang_model)
    given = {"launch": 2, "python": spec.python, "server_args": spec.args, "server_env": dict(spec.env), "poll_s": 0.1}
    engine = SglangEngine(
        sglang_model, parsed(Options, given), slots=8, context_length=200, dtype="float32", seed=3, decode=letters
    )
    (tmp_path / "logs").mkdir()
    engine.join_run("launched", str(tmp_path))
    await engine.start()
    try:
        stage(engine, tiny_llama(1))
        await engine.commit(FIRST)
        await wait_until(lambda: all(one.state == "serving" for one in engine.replicas), "both serve")
        assert len(list((tmp_path / "logs").glob("sglang-*.log"))) == 2
        await members_share_their_prompt(engine)

        first, second = engine.replicas
        old = pid_of(first)
        calls = [asyncio.create_task(engine.generate(ask(f"g{i}/0/0", max_new_tokens=120))) for i in range(8)]
        await wait_until(lambda: first.open > 0 and second.open > 0, "both have some")
        stage(engine, tiny_llama(2))
        committing = asyncio.create_task(engine.commit(SECOND))
        await wait_until(lambda: first.state == "updating", "it is being updated")
        os.killpg(old, signal.SIGKILL)
        await committing
        assert second.version == engine.version == SECOND
        for done in await asyncio.gather(*calls):
            assert (len(done.token_ids_N), done.finish_reason) == (120, "length")
            right = {version: scored(tiny_llama(seed), PROMPT, done.token_ids_N.tolist()) for version, seed in SEEDS}
            for span in done.spans:
                off = np.abs(done.logprobs_N - right[span.version])[span.start : span.end].max()
                assert off < 3e-4 or span.kv == "kept"

        await wait_until(lambda: first.state == "serving", "it was replaced", 240.0)
        assert (first.version, pid_of(first) != old) == (SECOND, True)
        second.limit = 0
        second._doubt.set()  # nothing goes there
        done = await engine.generate(ask("late/0/0"))
        assert [span.version for span in done.spans] == [SECOND]
        assert apart(done, tiny_llama(2)) < 3e-4
        pids = [old, *(pid_of(one) for one in engine.replicas)]
    finally:
        await engine.close()
    await wait_until(lambda: not any(group_of(pid) for pid in pids), "no process is left")


SEEDS: tuple[tuple[PolicyVersion, int], ...] = ((FIRST, 1), (SECOND, 2))
