"""One optimizer step: what it computes, what it leaves out, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from broker.messages import Group, Trajectory, VersionSpan
from consumers.losses.tokens import Denominators, LossSettings, LossTokens, Method
from consumers.trainer import StepResult, Trainer
from headrace.config import Config
from headrace.config_trainer import TrainerConfig
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion
from tests.tiny import tiny_llama


def model(seed: int = 0) -> Any:
    return tiny_llama(seed, vocab_size=97, tie_word_embeddings=False)


def group(rewards: list[float], seed: int = 0, behaviour: float = -4.5) -> Group:
    """One prompt of 6 tokens and completions of 3 to 5."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, 97, 6)
    made = []
    for i, reward in enumerate(rewards):
        tokens = np.concatenate([prompt, random.integers(0, 97, 3 + i % 3)]).astype(np.int32)
        mask = np.arange(tokens.size) >= 6
        spans = (VersionSpan(6, tokens.size, PolicyVersion(1, 0)),)
        logprobs = np.where(mask, behaviour, 0).astype(np.float32)
        made.append(Trajectory(tokens, logprobs, mask, spans, reward, "stop"))
    return Group(f"t{seed}", 1, "train", "sums", seed, "p", tuple(made))


def trainer(net: Any = None, **settings: Any) -> Trainer:
    settings = {"autocast": "off", "learning_rate": 1e-3, **settings}
    return Trainer(net or model(), Config(trainer=TrainerConfig(**settings)), Lane("trainer", "idle"))


def weights(one: Trainer) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in one.parameters().values()])


def run(one: Trainer, groups: list[Group], steps: int = 1) -> list[StepResult]:
    return [one.train(groups, step, 1) for step in range(steps)]


GROUPS = [group([1, 0, 0, 1], 1), group([0.3, 1, 0, 0], 2), group([0, 0, 1, 0], 3)]


def test_a_rollout_whose_tokens_all_left_the_loss_counts_in_no_denominator() -> None:
    """Its reward is the mean of the others, so that without it their advantages are the same."""
    whole = group([1, 0, 0.5, 0.5], 1)
    gone = replace(whole.trajectories[3], loss_mask_T=np.zeros_like(whole.trajectories[3].loss_mask_T))
    masked = replace(whole, trajectories=(*whole.trajectories[:3], gone))
    without = replace(whole, trajectories=whole.trajectories[:3])
    (one,), (other,) = (run(trainer(advantage="dr_grpo"), [each]) for each in (masked, without))
    assert one.loss == pytest.approx(other.loss, abs=1e-7)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    assert one.loss_tokens == other.loss_tokens


def test_microbatches_add_up_to_one_big_batch() -> None:
    one, many = trainer(token_budget=4096), trainer(token_budget=16)
    (whole,), (pieces,) = run(one, GROUPS), run(many, GROUPS)
    assert whole.packed_tokens < pieces.packed_tokens <= whole.tokens
    assert pieces.loss == pytest.approx(whole.loss, abs=1e-6)
    assert pieces.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    torch.testing.assert_close(weights(one), weights(many), atol=1e-4, rtol=0)


def test_training_makes_rewarded_completions_likelier() -> None:
    results = run(trainer(clip_high=10.0, clip_low=0.99), GROUPS, steps=8)
    assert results[-1].loss < results[0].loss - 0.1


def test_weights_taken_back_are_trained_on_as_if_nothing_had_been_before() -> None:
    one = trainer()
    run(one, GROUPS, steps=3)
    start = {name: tensor.to(torch.bfloat16) for name, tensor in trainer().parameters().items()}
    one.restore(start)
    assert all(torch.equal(tensor, start[name].float()) for name, tensor in one.parameters().items())
    fresh = trainer()
    fresh.restore(start)
    assert run(one, GROUPS, steps=2) == run(fresh, GROUPS, steps=2), "the moments are those of a new optimizer"
    assert torch.equal(weights(one), weights(fresh))


def test_rollouts_without_advantage_stay_out_of_the_backward_pass() -> None:
    equal = group([1, 1, 1, 1], 9)
    one, two = trainer(), trainer()
    (alone,), (beside,) = run(one, GROUPS), run(two, [*GROUPS, equal])
    assert (alone.without_advantage, beside.without_advantage) == (0, 4)
    assert alone.packed_tokens == beside.packed_tokens
    assert beside.loss == pytest.approx(alone.loss * 12 / 16, rel=1e-5)


def test_a_batch_without_any_advantage_moves_nothing() -> None:
    one = trainer()
    before = weights(one).clone()
    (result,) = run(one, [group([1, 1], 1)])
    assert (result.skipped, result.packed_tokens, result.reward) == ("no rollout has an advantage", 0, 1.0)
    assert torch.equal(before, weights(one))


def test_accuracy_is_what_the_environment_says_whatever_the_reward() -> None:
    members = group([0.5, 0.0, 0.2], 1).trajectories
    said = [replace(member, correct=correct) for member, correct in zip(members, (True, False, None), strict=True)]
    assert trainer().train([replace(group([1], 1), trajectories=tuple(said))], 0, 1).accuracy == 0.5
    assert trainer().train([group([0.5, 0.0], 1)], 0, 1).accuracy is None


def infinite(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    return tokens.logprobs_N.sum() * float("inf")


def bent(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    """Finite, with a gradient that is not."""
    return torch.sqrt(tokens.logprobs_N - tokens.logprobs_N.detach()).sum()


@pytest.mark.parametrize(("name", "what"), [("infinite", "loss"), ("bent", "gradient")])
def test_a_step_that_is_not_finite_is_skipped(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer()
    monkeypatch.setattr(one, "_method", Method(globals()[name]))
    before = weights(one).clone()
    (result,) = run(one, GROUPS)
    assert result.skipped == f"the {what} is not finite"
    assert torch.equal(before, weights(one))
    monkeypatch.undo()
    after = trainer()
    assert one.train(GROUPS, 1, 1).loss == after.train(GROUPS, 1, 1).loss, "a skipped step leaves no gradient behind"


def test_autocast_stays_close_to_float32() -> None:
    (exact,), (half,) = run(trainer(), GROUPS), run(trainer(autocast="bfloat16"), GROUPS)
    assert half.loss == pytest.approx(exact.loss, abs=0.02)
    assert half.grad_norm == pytest.approx(exact.grad_norm, rel=0.1)


def test_mismatch_is_the_distance_to_the_sampler() -> None:
    near, far = (run(trainer(), [group([1, 0], 1, behaviour)])[0] for behaviour in (-4.6, -9.6))
    assert near.drift.mismatch < 1.0 < far.drift.mismatch
    assert far.drift.clipped == 1.0
