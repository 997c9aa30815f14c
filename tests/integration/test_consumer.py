"""A real trainer process against a real Redis and a producer that answers its tasks with random tokens."""

from __future__ import annotations

import json
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from broker.connect import connect_runs
from headrace.errors import Fenced, Refused, ServiceError, WeightError
from tests.trainers import BROKER, Begin, Trainers, events, lines, wait_until


async def test_a_run_from_its_first_version_to_its_summary(begin: Begin, trainers: Trainers) -> None:
    port, _player, folder = await begin()
    process = trainers.start()
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr

    made = lines(folder)
    assert [line["step"] for line in made] == [1, 2, 3, 4, 5, 6]
    assert all(line["lag"] <= 2 and line["skipped"] == "" and line["rollouts"] == 6 for line in made)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["accuracy_before"] == summary["accuracy_after"], "both evaluations ask the same of this producer"
    assert summary["evaluation_samples"] == 12
    assert summary["balance"]["train"]["verdicts"] == {"trained": 12}
    assert summary["balance"]["eval"]["verdicts"] == {"evaluated": 6}
    assert all(sheet["closed"] and sheet["outstanding"] == 0 for sheet in summary["balance"].values())
    assert summary["examples"][0]["prompt"] == "(((("
    assert 0 <= summary["idle_wait"]["trainer"] <= 1
    assert sum(summary["seconds"]["trainer"].values()) <= summary["wall_s"]

    exported = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert exported.num_parameters() > 0
    assert (folder / "model" / "tokenizer.json").exists()
    assert [p.name for p in sorted((folder / "checkpoints" / "1").iterdir())] == ["00000004", "00000006"]
    state = await port.state()
    assert (state.status, state.step) == ("finished", 6)
    assert not [peer for peer in await port.peers() if peer.role == "trainer"]


async def test_a_killed_trainer_goes_on_to_the_same_weights(
    begin: Begin, trainers: Trainers, tmp_path: Path, redis_url: str
) -> None:
    """Killed between two checkpoints: the steps after the last one are made again from the log, no rollout is lost."""
    port, _, folder = await begin(run={"steps": 9}, checkpoint={"every": 4}, evaluation={"prompts": 0})
    first = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 6, "six steps are made")
    first.send_signal(signal.SIGKILL)
    first.wait(20)
    before = {record.version.step: record for record in await port.steps_after(4)}
    second = trainers.start("--resume")
    stderr = await trainers.end(second)
    assert second.returncode == 0, stderr

    replayed = {event["step"]: event["loss"] for event in events(folder) if event["event"] == "replayed"}
    assert set(replayed) == set(before)
    losses = {
        line["step"]: line["loss"] for line in lines(folder) if line["step"] in replayed and line["version"][0] == "1"
    }
    assert losses == {step: pytest.approx(replayed[step], abs=1e-6) for step in losses}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 9
    assert summary["balance"]["train"]["verdicts"] == {"trained": 18}
    assert summary["balance"]["train"]["closed"]
    assert summary["balance"]["train"]["outstanding"] == 0


async def test_without_lag_every_group_is_sampled_from_the_newest_version(begin: Begin, trainers: Trainers) -> None:
    sections = {"run": {"steps": 4}, "staleness": {"max_lag": 0}, "evaluation": {"prompts": 0}}
    _port, player, folder = await begin(**sections)
    process = trainers.start()
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    assert [line["lag"] for line in lines(folder)] == [0, 0, 0, 0]
    assert [delivery.task.min_version.step for delivery in player.answered] == [0, 0, 1, 1, 2, 2, 3, 3]


async def test_a_run_that_was_trained_before_needs_resume(begin: Begin, trainers: Trainers) -> None:
    await begin(run={"steps": 1}, evaluation={"prompts": 0})
    await trainers.end(trainers.start())
    again = trainers.start()
    assert "has been trained before; --resume goes on with it" in await trainers.end(again)
    assert again.returncode == ServiceError.exit_code


async def test_a_finished_run_goes_on_with_more_steps(begin: Begin, trainers: Trainers, redis_url: str) -> None:
    port, _player, folder = await begin(run={"steps": 2})
    stderr = await trainers.end(trainers.start())
    before = json.loads((folder / "summary.json").read_text())
    assert before["steps"] == 2, stderr
    record, runs = await port.record(), connect_runs(redis_url, BROKER)
    await runs.amend(replace(record, config={**record.config, "run": {**record.config["run"], "steps": 4}}))
    await runs.close()
    stderr = await trainers.end(trainers.start("--resume"))
    assert [(line["step"], line["version"]) for line in lines(folder)] == [
        (1, "1.1"),
        (2, "1.2"),
        (3, "2.3"),
        (4, "2.4"),
    ], stderr
    after = json.loads((folder / "summary.json").read_text())
    assert (after["steps"], after["accuracy_before"]) == (4, before["accuracy_before"])
    assert after["balance"]["train"]["verdicts"] == {"trained": 8}
    assert after["balance"]["train"]["outstanding"] == 0
    assert (await port.state()).status == "finished"


async def test_told_to_leave_it_writes_a_checkpoint_and_the_run_goes_on_later(begin: Begin, trainers: Trainers) -> None:
    port, _player, folder = await begin(run={"steps": 40}, checkpoint={"every": 30}, evaluation={"prompts": 0})
    first = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 3, "three steps are made")
    first.send_signal(signal.SIGTERM)
    stderr = await trainers.end(first)
    assert first.returncode == 0, stderr
    step = len(lines(folder))
    assert (folder / "checkpoints" / "1" / f"{step:08d}" / "state.json").exists()
    second = trainers.start("--resume")
    await wait_until(lambda: len(lines(folder)) > step, "a step after the resume")
    assert lines(folder)[step]["version"] == f"2.{step + 1}"
    second.send_signal(signal.SIGTERM)
    await trainers.end(second)
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert sheet.closed


async def test_failed_groups_do_not_stop_the_run_until_nothing_else_comes(begin: Begin, trainers: Trainers) -> None:
    port, player, folder = await begin(evaluation={"prompts": 0})
    player.failing = True
    process = trainers.start()
    await wait_until(lambda: len(player.answered) >= 8, "more failures than there are slots")
    player.failing = False
    await wait_until(lambda: len(lines(folder)) >= 1, "a step from the groups that did not fail")
    player.failing = True
    stderr = await trainers.end(process)
    assert process.returncode == ServiceError.exit_code
    assert "groups all failed; the newest: reward raised ValueError: no" in stderr
    state = await port.state()
    assert (state.status, state.reason) == ("failed", stderr.splitlines()[-1].split(": ", 1)[1])
    made = len(lines(folder))
    assert [e["step"] for e in events(folder) if e["event"] == "checkpoint"][-1] == made, "what was made is saved"
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert sheet.closed
    assert sheet.reasons["failed: reward raised ValueError: no"] == sheet.verdicts["failed"]


async def test_weights_that_somebody_removed_end_the_trainer_with_a_sentence(
    begin: Begin, trainers: Trainers, tmp_path: Path
) -> None:
    """It stands still, as a run does whose producers have no weights: nothing else would tell."""
    _port, player, folder = await begin(run={"steps": 1000}, evaluation={"prompts": 0}, trainer={"group_size": 2})
    memory = tmp_path / "memory"
    memory.mkdir()
    trainers.environment["HEADRACE_SHM_DIR"] = str(memory)
    process = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 2, "two steps are made")
    player.paused = True

    def found_out() -> bool:
        for segment in memory.iterdir():
            segment.unlink(missing_ok=True)
        return process.returncode is not None

    await wait_until(found_out, "the trainer finds it out")
    stderr = await trainers.end(process)
    assert process.returncode == WeightError.exit_code
    assert "by another program" in stderr.splitlines()[-1]


async def test_a_version_without_a_place_ends_the_trainer_with_a_sentence(
    begin: Begin, trainers: Trainers, tmp_path: Path
) -> None:
    """Also while its intake waits for groups, and may lose its cancellation."""
    _port, player, folder = await begin(
        run={"steps": 1000}, evaluation={"prompts": 0}, checkpoint={"every": 1000}, trainer={"group_size": 2}
    )
    (tmp_path / "memory").mkdir()
    trainers.environment["HEADRACE_SHM_DIR"] = str(tmp_path / "memory")
    process = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 2, "two steps are made")
    player.paused = True
    (tmp_path / "memory").rename(tmp_path / "elsewhere")
    player.paused = False
    stderr = await trainers.end(process)
    assert process.returncode == WeightError.exit_code
    assert "Traceback" not in stderr
    assert "weight segments" in stderr.splitlines()[-1]


async def test_versions_without_memory_are_skipped_until_there_is_some(begin: Begin, trainers: Trainers) -> None:
    port, _player, folder = await begin(
        run={"steps": 1000}, evaluation={"prompts": 0}, checkpoint={"every": 1000}, trainer={"group_size": 2}
    )
    process = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 2, "two steps are made")
    # A limit on the size of its files stands in for full memory.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    def skipped() -> bool:
        return any(line["event"] == "publish_skipped" for line in events(folder))

    await wait_until(skipped, "a version is skipped")
    before = await port.head()
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    async def published() -> bool:
        head = await port.head()
        return head is not None and before is not None and head > before

    await wait_until(published, "versions are published again")


async def test_a_fenced_trainer_ends_with_a_sentence(begin: Begin, trainers: Trainers) -> None:
    port, _player, folder = await begin(run={"steps": 1000}, evaluation={"prompts": 0})
    first = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 1, "a step is made")
    await port.take_fence(1)
    stderr = await trainers.end(first)
    assert first.returncode == Fenced.exit_code
    assert "belongs to the trainer of incarnation" in stderr


async def test_a_run_that_is_not_there_is_a_sentence(begin: Begin, trainers: Trainers) -> None:
    await begin()
    process = trainers.start("--run", "no-such-run")
    assert "no run 'no-such-run'" in await trainers.end(process)
    assert process.returncode == Refused.exit_code
