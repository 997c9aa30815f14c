"""A trainer process with everything that a step can have, killed and resumed; and one whose engine is another."""

from __future__ import annotations

import signal
from typing import Any

from headrace.version import PolicyVersion
from tests.trainers import Begin, Trainers, events, lines, trouble, wait_until
from weightsync.manifest import decode

EVERYTHING: dict[str, Any] = {
    "loss": "decoupled_ppo",
    "advantage": "reinforce_pp_baseline",
    "minibatches": 2,
    "mask": "sequence",
    "mask_low": 0.2,
    "mask_high": 5.0,
    "kl_coefficient": 0.05,
    "entropy_coefficient": 0.01,
    "schedule": "cosine",
    "warmup_steps": 2,
    "overlong_buffer": 4,
    "dynamic_sampling": 1,
}
BEFORE_ANY_CHECKPOINT: dict[str, Any] = {
    "model": {"wire_dtype": "float32"},
    "checkpoint": {"every": 100},
    "evaluation": {"prompts": 0},
}


async def test_a_killed_trainer_makes_the_same_steps_again_by_any_method(begin: Begin, trainers: Trainers) -> None:
    """Minibatches, a reference model, a schedule: the weights are those from before, to the bit."""
    port, player, folder = await begin(run={"steps": 10}, trainer=EVERYTHING, **BEFORE_ANY_CHECKPOINT)
    first = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 6, "six steps are made, which no checkpoint contains")
    player.paused = True

    async def rests() -> bool:
        step = (await port.state()).step
        depths = await port.depths()
        nobody_plays = depths.tasks_held == depths.groups_waiting == 0
        too_few_for_a_step = depths.groups_held - 2 * step < 2
        at_its_head = await port.head() == PolicyVersion(1, step) and len(lines(folder)) == step
        return nobody_plays and too_few_for_a_step and at_its_head

    await wait_until(rests, "all that came is trained on and published")
    newest = await port.head()
    assert newest is not None
    before = await port.manifest(newest)
    assert before is not None
    first.send_signal(signal.SIGKILL)
    first.wait(20)

    second = trainers.start("--resume")

    async def caught_up() -> bool:
        head = await port.head()
        return head is not None and head.incarnation == 2

    await wait_until(caught_up, "it publishes")
    after = await port.manifest(PolicyVersion(2, newest.step))
    assert after is not None, "its first version is the newest of before"
    assert decode(after).parts[0].digests == decode(before).parts[0].digests
    player.paused = False
    stderr = await trainers.end(second)
    assert second.returncode == 0, stderr

    made = lines(folder)
    assert [line["step"] for line in made] == list(range(1, 11))
    assert len([event for event in events(folder) if event["event"] == "replayed"]) >= 6
    assert made[0]["learning_rate"] < made[1]["learning_rate"] > made[8]["learning_rate"] > made[9]["learning_rate"]
    assert all(line["reference_kl"] >= 0 and line["entropy"] > 0 for line in made)
    assert made[-1]["reference_kl"] > 1e-4, "a resumed trainer has the reference that the run began with"
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert (sheet.closed, sheet.outstanding, sheet.verdicts["trained"]) == (True, 0, 20)
    assert sheet.verdicts["filtered"] == sheet.reasons["filtered: all its rewards are equal"] > 0


async def test_an_engine_of_another_policy_is_a_trouble_until_it_is_mended(begin: Begin, trainers: Trainers) -> None:
    port, player, folder = await begin(
        run={"steps": 12},
        sampling={"max_new_tokens": 64},
        staleness={"max_lag": 0},
        evaluation={"prompts": 0},
    )
    player.completion, player.logprob = 60, -3.0
    process = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 4, "it has trained on what the wrong engine sampled")
    player.paused = True
    said = await trouble(port)
    assert said["kind"] == "engine"
    assert "the KL from engine to trainer is 1." in said["reason"]
    player.logprob, player.paused = -5.55, False
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    assert "over after" in stderr
    assert len([event for event in events(folder) if event["event"] == "disagreement"]) == 1
    kls = [line["engine_kl"] for line in lines(folder) if line["engine_tokens"]]
    assert kls[0] > 1 > 0.02 > kls[-1]
