"""A trainer of two ranks: real processes that exchange by gloo, against a real Redis and a producer that plays."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from consumers import checkpoint
from consumers.export import export
from headrace.errors import ConfigError, ServiceError
from headrace.policy.loading import load_model
from tests.trainers import Begin, Trainers, events, lines, trouble, wait_until
from weightsync.arena import Arena

# At lag 0 nothing depends on who is how fast.
EXACT = {"run": {"steps": 4}, "staleness": {"max_lag": 0}, "evaluation": {"prompts": 0}}
DIES = """
import os, signal
if os.environ["RANK"] == "{rank}":
    from {module} import {owner}
    real, calls = {owner}.{method}, 0
    def dying(*arguments, **named):
        global calls
        calls += 1
        if calls == {call}:
            {death}
        return real(*arguments, **named)
    {owner}.{method} = dying
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
MOMENTS = {
    "in a forward pass": ("consumers.trainer", "Trainer", "_accumulate", 3),
    "in the optimizer": ("consumers.trainer", "Trainer", "_move", 3),
    "while it publishes": ("weightsync.publisher", "Publisher", "_fill", 3),
    "before anything is loaded": ("consumers.parts", "Layout", "of", 1),
}
TOLERANCE = 1e-5
"""Of a weight after four steps at a learning rate of 1e-3: sums over two ranks are taken in another order."""


def weights(folder: Path) -> torch.Tensor:
    """Of the newest checkpoint, flat."""
    newest = max((folder / "checkpoints").glob("*/[0-9]*"), key=lambda path: path.name)
    tensors = checkpoint.load(newest).model
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


async def alone(begin: Begin, trainers: Trainers, beside: str, ranks: int = 1, **sections: object) -> Path:
    """The folder of the same run by a trainer of so many ranks that nothing happens to."""
    port, _, folder = await begin(beside=beside, **{**EXACT, **sections})
    run_id = (await port.record()).run_id
    started = trainers.start_ranks(ranks, HEADRACE_RUN=run_id)
    for process in started:
        stderr = await trainers.end(process)
        assert process.returncode == 0, stderr
    return folder


@pytest.mark.parametrize("parallel", ["data", "fsdp"])
async def test_two_ranks_equal_one_on_the_same_stream(begin: Begin, trainers: Trainers, parallel: str) -> None:
    # With a penalty, so that the reference model is asked as well, and with layers that are computed twice.
    again = parallel == "fsdp"
    sections = {"trainer": {"parallel": parallel, "kl_coefficient": 0.1, "activation_checkpointing": again}}
    port, _player, folder = await begin(**EXACT, **sections)
    started = trainers.start_ranks(2)
    for process in started:
        stderr = await trainers.end(process)
        assert process.returncode == 0, stderr
    one = await alone(begin, trainers, "-one", **sections)

    made, same = lines(folder), lines(one)
    assert [line["step"] for line in made] == [1, 2, 3, 4]
    for ours, theirs in zip(made, same, strict=True):
        for name in ("loss", "grad_norm", "mismatch", "ratio_p99", "effective"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-4), name
        for name in ("rollouts", "loss_tokens", "reward", "lag", "skipped", "without_advantage"):
            assert ours[name] == theirs[name], name
    assert float((weights(folder) - weights(one)).abs().max()) < TOLERANCE
    assert json.loads((folder / "summary.json").read_text())["balance"]["train"]["verdicts"] == {"trained": 8}
    lane = [json.loads(line) for line in (folder / "trainer-1.jsonl").read_text().splitlines()]
    # Of a second with many phases only the sums are written.
    phases = {phase for line in lane for phase in (*dict(line.get("spans", ())), *line.get("sums", ()))}
    assert {"forward_backward", "gradient_sync", "wait_order", "weight_publish"} <= phases
    assert not [peer for peer in await port.peers() if peer.role in ("trainer", "rank")]


def dies(rank: int, moment: tuple[str, str, str, int], death: str = KILLED) -> str:
    """Python by which a rank ends itself at a call of a method."""
    module, owner, method, call = moment
    return DIES.format(rank=rank, module=module, owner=owner, method=method, call=call, death=death)


def torchrun(trainers: Trainers, size: int, *options: str, again: int = 0) -> subprocess.Popen[str]:
    """`again`: how often it starts all ranks anew."""
    its = ["--standalone", "--max-restarts", str(again), "--nproc-per-node", str(size)]
    command = ["-m", "torch.distributed.run", *its, "-m", "consumers", *options]
    return subprocess.Popen(
        [sys.executable, *command],
        env=trainers.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_rank_killed_at_any_time_costs_nothing(
    begin: Begin, trainers: Trainers, rank: int, moment: str
) -> None:
    _, _, folder = await begin(**EXACT)
    started = trainers.start_ranks(2, first=dies(rank, MOMENTS[moment]))
    said = [await trainers.end(process) for process in started]
    assert started[rank].returncode == -signal.SIGKILL
    assert started[1 - rank].returncode == ServiceError.exit_code
    assert "another rank has died, and the trainer ends with it; --resume goes on" in said[1 - rank].splitlines()[-1]
    assert "Traceback" not in said[1 - rank]
    for process in trainers.start_ranks(2, "--resume"):
        stderr = await trainers.end(process)
        assert process.returncode == 0, stderr
    whole = await alone(begin, trainers, "-whole", ranks=2)
    assert torch.equal(weights(folder), weights(whole))
    assert json.loads((folder / "summary.json").read_text())["balance"]["train"]["verdicts"] == {"trained": 8}


SHARDED = {"trainer": {"parallel": "fsdp"}, "checkpoint": {"every": 1}}


@pytest.mark.parametrize(
    ("rank", "moment"),
    [
        (1, ("consumers.trainer", "Trainer", "_accumulate", 3)),
        (1, ("consumers.trainer", "Trainer", "_move", 3)),
        (0, ("consumers.sharded", "Writing", "_finish", 2)),
        (1, ("consumers.sharded", "Writing", "_finish", 2)),
        (0, ("consumers.checkpoint", "Checkpoints", "place", 2)),
    ],
    ids=[
        "in a forward pass",
        "in the optimizer",
        "while rank 0 writes",
        "while rank 1 writes",
        "before it is in its place",
    ],
)
async def test_sharded_ranks_go_on_to_the_same_weights(
    begin: Begin, trainers: Trainers, rank: int, moment: tuple[str, str, str, int]
) -> None:
    _, _, folder = await begin(**EXACT, **SHARDED)
    for process in trainers.start_ranks(2, first=dies(rank, moment)):
        assert "Traceback" not in await trainers.end(process)
        assert process.returncode != 0
    for process in trainers.start_ranks(2, "--resume"):
        stderr = await trainers.end(process)
        assert process.returncode == 0, stderr
    whole = await alone(begin, trainers, "-whole", ranks=2, **SHARDED)
    assert torch.equal(weights(folder), weights(whole))
    assert json.loads((folder / "summary.json").read_text())["balance"]["train"]["verdicts"] == {"trained": 8}
    files = sorted(file.name for file in (folder / "checkpoints" / "2" / "00000004").iterdir())
    assert files == [f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)] + ["state.json"]


async def test_steps_go_on_while_ranks_write(begin: Begin, trainers: Trainers) -> None:
    """And nothing is acknowledged before they have."""
    port, _, folder = await begin(**{**EXACT, "run": {"steps": 1000}}, **SHARDED)
    slow = ("consumers.sharded", "Writing", "_finish", 1)
    go = folder / "go"
    wait = f"import pathlib, time; [time.sleep(0.05) for _ in iter(lambda: pathlib.Path({str(go)!r}).exists(), True)]"
    processes = trainers.start_ranks(2, first=dies(0, slow, wait))
    await wait_until(lambda: len(lines(folder)) >= 4, "steps are made while the first checkpoint is written")
    assert not [event for event in events(folder) if event["event"] == "checkpoint"]
    balance = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert balance.verdicts.get("trained", 0) == 0
    go.touch()
    await wait_until(
        lambda: any(event["event"] == "checkpoint" for event in events(folder)), "the first checkpoint is there"
    )
    assert next(event["step"] for event in events(folder) if event["event"] == "checkpoint") == 1
    for process in processes:
        process.terminate()
    for process in processes:
        assert "Traceback" not in await trainers.end(process)
        assert process.returncode == 0


async def test_a_rank_without_room_for_a_checkpoint_is_waited_for(begin: Begin, trainers: Trainers) -> None:
    port, _, folder = await begin(**{**EXACT, "run": {"steps": 1000}}, **SHARDED)
    processes = trainers.start_ranks(2)
    await wait_until(lambda: len(lines(folder)) >= 2, "two steps are made")
    # A limit on the size of its files stands in for a full disk.
    resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    said = await trouble(port)
    assert said["kind"] == "checkpoint"
    assert "cannot be written: rank 1: file too large; nothing is lost, and it is tried again" in said["reason"]
    made = len(lines(folder))
    resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def saved() -> bool:
        return any(event["event"] == "checkpoint" and event["step"] > made for event in events(folder))

    await wait_until(saved, "a checkpoint is there again")
    for process in processes:
        process.terminate()
    for process in processes:
        stderr = await trainers.end(process)
        assert process.returncode == 0, stderr


async def test_torchrun_starts_all_ranks_again(begin: Begin, trainers: Trainers) -> None:
    port, player, folder = await begin(**EXACT)
    player.most = 4
    with torchrun(trainers, 2, "--resume", again=2) as process:
        await wait_until(lambda: len(lines(folder)) == 2, "two steps are made")
        child: list[int] = []

        async def said() -> bool:
            child[:] = [peer.pid for peer in await port.peers() if peer.name == "trainer-1"]
            return bool(child)

        await wait_until(said, "rank 1 says that it lives")
        os.kill(child[0], signal.SIGKILL)
        player.most = sys.maxsize
        out, _ = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0, out
    assert [line["step"] for line in lines(folder)] == [1, 2, 3, 4]
    whole = await alone(begin, trainers, "-whole", ranks=2)
    assert torch.equal(weights(folder), weights(whole))


async def test_an_error_in_one_rank_ends_all_with_its_reason(begin: Begin, trainers: Trainers) -> None:
    await begin(**EXACT)
    moment = ("consumers.trainer", "Trainer", "_accumulate", 2)
    started = trainers.start_ranks(2, first=dies(1, moment, 'raise ValueError("the loss has no value")'))
    said = [await trainers.end(process) for process in started]
    assert started[0].returncode == ServiceError.exit_code
    assert said[0].splitlines()[-1].endswith("rank 1: ValueError: the loss has no value")
    assert "Traceback" not in said[0]
    assert started[1].returncode not in (0, None)


async def test_an_update_that_is_not_finite_on_one_rank_is_skipped_by_all(begin: Begin, trainers: Trainers) -> None:
    _, _, folder = await begin(**EXACT)
    moment = ("consumers.trainer", "Trainer", "_accumulate", 2)
    started = trainers.start_ranks(2, first=dies(1, moment, 'real(*arguments, **named); return float("nan")'))
    for process in started:
        stderr = await trainers.end(process)
        assert process.returncode == 0, stderr
    assert [line["skipped"] for line in lines(folder)] == ["", "the loss is not finite", "", ""]


async def test_a_rank_that_hangs_ends_the_others_in_time(begin: Begin, trainers: Trainers) -> None:
    _, _, folder = await begin(**{**EXACT, "run": {"steps": 1000}, "trainer": {"ranks_silent_s": 2.0}})
    first, second = trainers.start_ranks(2)
    await wait_until(lambda: len(lines(folder)) >= 1, "a step is made")
    second.send_signal(signal.SIGSTOP)
    stderr = await trainers.end(first)
    assert first.returncode == ServiceError.exit_code
    assert "another rank was silent for 2 s, and the trainer ends with it" in stderr.splitlines()[-1]


async def test_a_trainer_starts_its_ranks_itself(begin: Begin, trainers: Trainers) -> None:
    """And says which of them died."""
    port, _, folder = await begin(**{**EXACT, "run": {"steps": 1000}, "trainer": {"ranks": 2}})
    process = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 1, "a step is made")

    async def said() -> bool:
        return any(peer.name == "trainer-1" and peer.state["version"] for peer in await port.peers())

    await wait_until(said, "rank 1 says what it published")
    process.terminate()
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    again = trainers.start("--resume")
    made = len(lines(folder))
    await wait_until(lambda: len(lines(folder)) > made, "another step is made")
    (child,) = [peer.pid for peer in await port.peers() if peer.name == "trainer-1" and peer.alive]
    os.kill(child, signal.SIGKILL)
    stderr = await trainers.end(again)
    assert again.returncode == ServiceError.exit_code
    assert f"rank 1 (process {child}) was killed by SIGKILL, and the trainer ends with it" in stderr.splitlines()[-1]


async def test_a_run_goes_on_with_other_numbers_of_ranks(
    begin: Begin, trainers: Trainers, tiny_model: Path, tmp_path: Path
) -> None:
    """One, two by torchrun and three that are killed, each with a part of the model, and one again."""
    sections = {**EXACT, "trainer": {"parallel": "fsdp", "groups_per_step": 3}}
    port, player, folder = await begin(**sections)
    player.most = 3
    first = trainers.start()
    await wait_until(lambda: len(lines(folder)) == 1, "one rank makes a step")
    first.terminate()
    assert "Traceback" not in await trainers.end(first)
    player.most = 6
    with torchrun(trainers, 2, "--resume") as process:
        await wait_until(lambda: len(lines(folder)) == 2, "two ranks make one")
        process.terminate()
        said, _ = await asyncio.to_thread(process.communicate, timeout=100)
    sharded = folder / "checkpoints" / "2" / "00000002"
    assert (sharded / "state.json").exists(), said
    exported = load_model(export(sharded, tiny_model, tmp_path / "exported", "float32"), "float32")
    expected = checkpoint.load(sharded).model
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported.named_parameters())
    player.most = 9
    three = trainers.start_ranks(3, "--resume")
    await wait_until(lambda: len(lines(folder)) == 3, "three ranks make one")
    for rank in three:
        rank.kill()
    player.most = sys.maxsize
    last = trainers.start("--resume")
    stderr = await trainers.end(last)
    assert last.returncode == 0, stderr
    assert Arena(run_folder=folder).segments((await port.record()).run_id) == [], "of ranks that there are no longer"
    one = await alone(begin, trainers, "-one", **sections)
    assert float((weights(folder) - weights(one)).abs().max()) < TOLERANCE


async def test_ranks_exchange_by_a_backend_that_a_module_registers(begin: Begin, trainers: Trainers) -> None:
    _, _, folder = await begin(**{**EXACT, "run": {"steps": 2}, "trainer": {"backend": "ucc"}})
    for process in trainers.start_ranks(2, HEADRACE_TORCH_BACKENDS="tests.ucc_backend"):
        stderr = await trainers.end(process)
        assert process.returncode == 0, stderr
    assert [line["skipped"] for line in lines(folder)] == ["", ""]


@pytest.mark.parametrize(
    ("given", "size", "said"),
    [
        ({"backend": "nccl"}, 2, 'trainer.backend = "nccl" moves tensors between GPUs, and model.device = "auto"'),
        ({"backend": "ucc"}, 2, 'trainer.backend = "ucc" cannot be used: this torch is built without UCC'),
        ({}, 3, "trainer.ranks: 3 is more than the 2 groups of an optimizer update (trainer.groups_per_step = 2"),
    ],
)
async def test_ranks_that_cannot_be_are_one_sentence(
    begin: Begin, trainers: Trainers, given: dict[str, str], size: int, said: str
) -> None:
    await begin(**{**EXACT, "trainer": given})
    process = trainers.start(RANK="0", WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    stderr = await trainers.end(process)
    assert process.returncode == ConfigError.exit_code, stderr
    assert said in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
