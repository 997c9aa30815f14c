"""`headrace weights` as a process, on a real Redis and versions in shared memory."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from broker.api import Order, Peer, RunRecord, Runs
from broker.connect import Run, connect_run
from broker.messages import SCHEMA
from headrace.config import Config
from headrace.errors import ServiceError, WeightError
from headrace.policy.loading import layout_of, model_digests
from headrace.version import PolicyVersion
from tests.conftest import BROKER
from tests.support import wait_until
from tests.tiny import VOCABULARY, tiny_llama
from tests.weights import flip
from weightsync.arena import Arena
from weightsync.manifest import Layout, decode, encode
from weightsync.publisher import Publisher


class Desk:
    """A run with a publisher, and the command line. Publishes at most two live versions."""

    def __init__(self, url: str, record: RunRecord, port: Run, folder: Path) -> None:
        self.run_id, self.port, self.folder = record.run_id, port, folder
        self.arena = Arena(folder / "memory")
        self.model = folder / "model"
        self._url = url

    async def begin(self) -> None:
        self.fence = await self.port.take_fence(0)
        layout = Layout.of(layout_of(tiny_llama(), "bfloat16"))
        self.publisher = Publisher(self.port, self.fence, layout, self.run_id, 2, arena=self.arena)

    async def publish(self, step: int) -> PolicyVersion:
        version = PolicyVersion(self.fence.incarnation, step)
        assert await self.publisher.publish(version, dict(tiny_llama(step).named_parameters()))
        await self.publisher.sealed()
        return version

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "weights", *arguments, "--run", self.run_id],
            cwd=self.folder,
            env={
                "PYTHONPATH": str(Path.cwd()),
                "PATH": "/usr/bin:/bin",
                "HOME": str(self.folder),
                "COLUMNS": "200",
                "OMP_NUM_THREADS": "1",
                "HEADRACE_REDIS_URL": self._url,
                "HEADRACE_SHM_DIR": str(self.arena.folder),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=100)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def said(self, *arguments: str) -> str:
        done = self(*arguments)
        assert (done.stderr, done.returncode) == ("", 0)
        return done.stdout

    def refused(self, code: int, *arguments: str) -> str:
        done = self(*arguments)
        assert (done.stdout, done.returncode) == ("", code)
        (line,) = done.stderr.splitlines()
        return line


@pytest.fixture
async def desk(
    redis_url: str, run_id: str, runs: Runs, tiny_model: Path, tmp_path: Path, no_key_left: None
) -> AsyncIterator[Desk]:
    (tmp_path / "memory").mkdir()
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = Config.model_validate({"model": {"path": str(model)}, "weights": {"lease_s": 1.0}})
    record = RunRecord(run_id, SCHEMA, config.model_dump(mode="json"), model_digests(model), VOCABULARY)
    await runs.create(record)
    port = connect_run(redis_url, run_id, BROKER)
    desk = Desk(redis_url, record, port, tmp_path)
    await desk.begin()
    yield desk
    await desk.publisher.close()
    await port.close()
    await runs.delete(run_id)


async def test_a_pinned_version_stays_and_is_exported_bit_by_bit(desk: Desk) -> None:
    assert desk.said("list") == "no weight version was published yet\n"
    assert desk.refused(WeightError.exit_code, "pin", "head").endswith("has not published a weight version yet")
    kept = await desk.publish(1)
    assert desk.said("pin", "head").startswith(f"run {desk.run_id} keeps weight version {kept} until")
    for step in range(2, 6):
        await desk.publish(step)
    rows = json.loads(desk.said("list", "--json"))
    assert [row["version"] for row in rows][-1] == str(kept)
    assert len(rows) < 5, "the others are freed"
    assert [row["head"] for row in rows] == [True] + [False] * (len(rows) - 1)

    out = desk.folder / "out" / "exported"
    assert desk.said("export", str(kept), str(out)) == f"exported {out}\n"
    exported = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert exported.dtype == torch.bfloat16
    for name, parameter in tiny_llama(1).named_parameters():
        assert torch.equal(exported.get_parameter(name), parameter.to(torch.bfloat16)), name
    assert AutoTokenizer.from_pretrained(out).eos_token == "<|end|>"
    assert [path.name for path in out.parent.iterdir()] == ["exported"], "nothing half-written is left"
    assert await desk.port.leased() == {}

    desk.said("unpin", str(kept))
    await desk.publish(6)
    assert desk.refused(WeightError.exit_code, "pin", str(kept)).startswith(
        f"headrace: run {desk.run_id} has no weight version {kept} (any more)"
    )
    assert desk.refused(WeightError.exit_code, "unpin", str(kept)).endswith(
        "is not pinned; see `headrace weights list`"
    )


async def test_a_version_that_is_still_being_published_is_not_pinned(desk: Desk) -> None:
    """It may be given up, and would then be kept for ever."""
    data = await desk.port.manifest(await desk.publish(1))
    assert data is not None
    sealed = decode(data)
    coming = sealed.version._replace(step=2)
    parts = tuple(replace(part, host="elsewhere", digests=()) for part in sealed.parts)
    begun = replace(sealed, version=coming, sealed=False, sealed_s=0.0, parts=parts)
    await desk.port.announce(desk.fence, coming, encode(begun))
    assert "is still being published" in desk.refused(WeightError.exit_code, "pin", str(coming))
    assert await desk.port.pinned() == set()


async def test_what_cannot_be_exported_is_refused_and_leaves_nothing(desk: Desk) -> None:
    version = await desk.publish(1)
    assert "has no weight version 1.9 (any more)" in desk.refused(5, "export", "1.9", "out")
    (segment,) = desk.arena.segments(desk.run_id)
    file = desk.arena.folder / str(segment)
    flip(file, 5)
    assert "version 1.1 is damaged in the memory of this host: the digest of chunk 0" in desk.refused(
        5, "export", str(version), "out"
    )
    flip(file, 5)
    (desk.folder / "full").mkdir()
    (desk.folder / "full" / "letter").touch()
    assert "full is there and no export made it" in desk.refused(5, "export", str(version), "full")
    template = desk.model / "chat_template.jinja"
    text = template.read_text()
    template.write_text("another")
    assert "chat_template in" in (said := desk.refused(5, "export", str(version), "out"))
    assert f"is not that of run {desk.run_id}" in said
    template.write_text(text)
    file.rename(desk.folder / "moved")
    said = desk.refused(5, "export", str(version), "out")
    assert "it cannot be exported: version 1.1 is not in the memory of this host" in said
    assert not (desk.folder / "out").exists()
    assert await desk.port.leased() == {}
    (desk.folder / "moved").rename(file)


async def test_a_version_that_is_read_is_not_freed(desk: Desk) -> None:
    version = await desk.publish(1)
    reading = desk.start("export", str(version), "out")
    holders: list[str] = []

    async def leased() -> bool:
        holders[:] = (await desk.port.leased()).get(version, [])
        return bool(holders)

    await wait_until(leased, "the version is leased", 60)
    assert holders[0].startswith("export-")
    await desk.publish(2)
    _, err = await asyncio.to_thread(reading.communicate, timeout=100)
    assert (err, reading.returncode) == ("", 0), "it takes longer than one lease"
    assert await desk.port.leased() == {}


async def answered(desk: Desk, answer: dict[str, str], pid: int = 1) -> subprocess.CompletedProcess[str]:
    """`headrace weights rollback 1.1`, and a trainer's heartbeat of this process with an answer to it."""

    async def beat(pid: int, **answers: dict[str, str]) -> None:
        await desk.port.heartbeat(Peer("trainer", "trainer", "h", pid, True, {"answers": answers}), 60.0)

    await beat(1)
    await desk.port.orders("$", 0)
    asking = asyncio.create_task(asyncio.to_thread(desk, "rollback", "1.1"))
    orders: list[Order] = []
    while not orders:
        orders = await desk.port.orders("$", 500)
    assert (orders[0].kind, orders[0].target) == ("rollback", "1.1")
    await beat(pid, **{orders[0].reason: answer})
    return await asking


async def test_a_rollback_waits_for_the_answer_of_its_trainer(desk: Desk) -> None:
    assert "has no trainer that could roll back; `headrace up --resume` starts one" in desk.refused(
        ServiceError.exit_code, "rollback", "1.1"
    )
    done = await answered(desk, {"version": "2.9"})
    said = f"weight version 2.9 of run {desk.run_id} has the weights of 1.1, and training goes on\n"
    assert (done.stdout, done.stderr, done.returncode) == (said, "", 0)
    done = await answered(desk, {"refused": "it is gone"})
    assert done.stderr == f"headrace: run {desk.run_id} does not go back to weight version 1.1: it is gone\n"
    assert done.returncode == WeightError.exit_code
    done = await answered(desk, {"version": "2.9"}, pid=2)
    assert "the trainer of run" in done.stderr
    assert "went away before it had answered" in done.stderr
    assert done.returncode == ServiceError.exit_code
