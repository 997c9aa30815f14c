"""Steps by each loss: order, splits and padding change nothing; minibatches, the reference model, the entropy bonus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from broker.messages import Group, KvState, Trajectory, VersionSpan
from consumers.losses import LOSSES
from consumers.losses.tokens import Denominators, LossSettings, LossTokens
from consumers.trainer import Trainer
from headrace.config import Config
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion
from tests.tiny import tiny_llama

PROMPT, VOCABULARY = 6, 97
WIDE = {"clip_low": 0.6, "clip_high": 1.5}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"loss": name, **WIDE} for name in LOSSES},
    "reinforce_pp": {"loss": "ppo", "advantage": "reinforce_pp"},
    "reinforce_pp_baseline": {"loss": "ppo", "advantage": "reinforce_pp_baseline"},
    "rloo": {"loss": "reinforce", "advantage": "rloo"},
    "corrected by token": {"correction": "token", "mask": "token", "mask_low": 0.7, "mask_high": 1.4},
    "corrected by rollout": {"correction": "sequence", "mask": "sequence", "mask_low": 0.9, "mask_high": 1.1},
    "regularised": {"kl_coefficient": 0.1, "entropy_coefficient": 0.05},
}


def model(seed: int = 0) -> Any:
    return tiny_llama(seed, vocab_size=VOCABULARY, tie_word_embeddings=False, initializer_range=0.1)


@torch.no_grad()
def logprobs(net: Any, tokens_T: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """[T]: of each token after those before it, by an ordinary forward pass; 0 for the first."""
    ids = torch.from_numpy(tokens_T.astype(np.int64))
    logs = torch.log_softmax(net(input_ids=ids[None], use_cache=False).logits[0].float() / temperature, -1)
    return np.concatenate([[0.0], logs[:-1].gather(1, ids[1:, None])[:, 0].numpy()])


def group(seed: int, rewards: Sequence[float], noise: float = 0.3, **origin: Any) -> Group:
    """One prompt, completions of 3 to 6 tokens, sampled by a policy that differs by `noise` from the model."""
    random = np.random.default_rng(seed)
    prompt, net = random.integers(0, VOCABULARY, PROMPT), model()
    made = []
    for number, reward in enumerate(rewards):
        tokens = np.concatenate([prompt, random.integers(0, VOCABULARY, 3 + number % 4)]).astype(np.int32)
        mask = np.arange(tokens.size) >= PROMPT
        sampled = logprobs(net, tokens) + noise * random.normal(size=tokens.size)
        made.append(one(tokens, mask, sampled, reward, **origin))
    return Group(f"t{seed}", 1, "train", "sums", seed, "p", tuple(made))


def one(
    tokens: np.ndarray, mask: np.ndarray, sampled: np.ndarray, reward: float, step: int = 0, kv: KvState = "fresh"
) -> Trajectory:
    spans = (VersionSpan(PROMPT, tokens.size, PolicyVersion(1, step), kv),)
    return Trajectory(tokens, np.where(mask, sampled, 0).astype(np.float32), mask, spans, reward, "stop")


def trainer(reference: Any = None, sampling: dict[str, Any] | None = None, **settings: Any) -> Trainer:
    settings = {"autocast": "off", "learning_rate": 1e-3, "weight_decay": 0.01, **settings}
    config = Config.model_validate({"trainer": settings, "sampling": sampling or {"max_new_tokens": 8}})
    if reference is None and config.trainer.kl_coefficient:
        reference = model(5)
    return Trainer(model(), config, Lane("trainer", "idle"), reference)


def weights(made: Trainer) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in made.parameters().values()])


GROUPS = [group(1, [1, 0, 0, 1]), group(2, [0.3, 1, 0, 0, 0.5]), group(3, [0, 0, 1])]


def gradient(groups: Sequence[Group], **settings: Any) -> tuple[float, torch.Tensor]:
    """Loss, and the gradient of one update, before clipping."""
    made = trainer(**settings)
    caught: list[torch.Tensor] = []

    def caught_instead(total: float, step: int) -> tuple[float, str]:
        caught.append(torch.cat([parameter.grad.flatten() for parameter in made._model.parameters()]))
        return 1.0, ""

    made._move = caught_instead  # type: ignore[method-assign]
    result = made.train(groups, 0, 1)
    return result.loss, caught[0]


def same(found: tuple[float, torch.Tensor], expected: tuple[float, torch.Tensor]) -> None:
    """To 1e-5 of the gradient's length, which is what float32 sums in another order differ by."""
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    assert float(expected[1].norm()) > 1e-4
    assert float((found[1] - expected[1]).norm()) < 1e-5 * float(expected[1].norm())


@pytest.mark.parametrize("name", VARIANTS)
def test_order_microbatches_and_padding_change_nothing(name: str) -> None:
    chosen = VARIANTS[name]
    expected = gradient(GROUPS, token_budget=4096, **chosen)
    same(gradient(GROUPS, token_budget=16, **chosen), expected)
    same(gradient(GROUPS, token_budget=16, activation_checkpointing=True, **chosen), expected)

    turned = [replace(each, trajectories=each.trajectories[::-1]) for each in reversed(GROUPS)]
    same(gradient(turned, token_budget=40, **chosen), expected)

    def padded(trajectory: Trajectory) -> Trajectory:
        """With tokens after the last one that counts, which nobody sampled."""
        return replace(
            trajectory,
            token_ids_T=np.concatenate([trajectory.token_ids_T, np.full(7, 9, np.int32)]),
            logprobs_T=np.concatenate([trajectory.logprobs_T, np.zeros(7, np.float32)]),
            loss_mask_T=np.concatenate([trajectory.loss_mask_T, np.zeros(7, np.bool_)]),
        )

    longer = [replace(each, trajectories=tuple(padded(t) for t in each.trajectories)) for each in GROUPS]
    same(gradient(longer, **chosen), expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    results = []
    for _ in range(2):
        made = trainer(minibatches=3, schedule="cosine", warmup_steps=1, **VARIANTS[name])
        results.append(([made.train(GROUPS, step, 1) for step in range(3)], weights(made)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][1], weights(trainer()))


def test_minibatches_are_updates_one_after_the_other() -> None:
    at_once, by_hand = trainer(minibatches=3), trainer()
    result = at_once.train(GROUPS, 0, 1)
    single = [by_hand.train([each], 0, 1) for each in GROUPS]
    assert torch.equal(weights(at_once), weights(by_hand))
    assert result.loss == pytest.approx(sum(each.loss for each in single) / 3)
    assert result.grad_norm == max(each.grad_norm for each in single)
    assert result.loss_tokens == sum(each.loss_tokens for each in single)


def test_a_minibatch_without_advantage_is_no_update() -> None:
    equal = group(4, [1, 1, 1])
    beside, alone = trainer(minibatches=2), trainer()
    result = beside.train([equal, GROUPS[0]], 0, 1)
    alone.train([GROUPS[0]], 0, 1)
    assert result.skipped == ""
    assert torch.equal(weights(beside), weights(alone))


def test_decoupled_ppo_compares_with_the_policy_that_begins_the_step() -> None:
    made = trainer(loss="decoupled_ppo", minibatches=3, importance_cap=1.1)
    given: list[LossTokens] = []
    loss = made._method.loss

    def noted(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
        given.append(tokens)
        return loss(tokens, denominators, settings)

    made._method = replace(made._method, loss=noted)
    result = made.train(GROUPS, 0, 1)
    assert made._lane.seconds()["proximal_logprobs"] > 0
    assert len(given) == 3
    for tokens, each in zip(given, GROUPS, strict=True):
        start = np.concatenate([logprobs(model(), t.token_ids_T)[t.loss_mask_T] for t in each.trajectories])
        kept = torch.tensor([adv != 0 for adv in tokens.advantages_N])
        assert kept.all()
        torch.testing.assert_close(tokens.old_N.double(), torch.tensor(start), atol=1e-4, rtol=0)
        expected = torch.exp(tokens.old_N - tokens.behaviour_N).clamp(max=1.1)
        torch.testing.assert_close(tokens.weights_N, expected)
    assert torch.equal(given[0].logprobs_N, given[0].old_N)
    assert float((given[2].logprobs_N.detach() - given[2].old_N).abs().max()) > 1e-3, "two updates lie between"
    assert result.drift.engine_tokens == result.loss_tokens, "the first policy's log-probs are known for all"


def test_one_update_needs_no_second_forward_pass() -> None:
    made = trainer(loss="decoupled_ppo")
    made.train(GROUPS, 0, 1)
    assert "proximal_logprobs" not in made._lane.seconds()


def test_the_penalty_holds_the_policy_at_the_reference() -> None:
    other = model(5)
    free, held = trainer(), trainer(other, kl_coefficient=0.5)
    far = [made.train(GROUPS, 0, 1) for made in (free, held)]
    assert far[0].drift.reference_kl is None
    values = []
    for each in (t for one_group in GROUPS for t in one_group.trajectories):
        difference = (logprobs(model(5), each.token_ids_T) - logprobs(model(), each.token_ids_T))[each.loss_mask_T]
        values += [np.exp(d) - d - 1 for d in difference]
    assert far[1].drift.reference_kl == pytest.approx(np.mean(values), rel=1e-3)
    assert held._lane.seconds()["reference_logprobs"] > 0
    later = [held.train(GROUPS, step, 1) for step in range(1, 12)]
    assert later[-1].drift.reference_kl is not None
    assert later[-1].drift.reference_kl < 0.7 * np.mean(values)
    assert torch.equal(other.lm_head.weight, model(5).lm_head.weight), "the reference is frozen"
    assert all(parameter.grad is None for parameter in other.parameters())


def test_at_its_reference_the_policy_feels_no_penalty() -> None:
    plain, held = gradient(GROUPS), gradient(GROUPS, reference=model(), kl_coefficient=5.0)
    same(held, plain)


def test_groups_of_equal_rewards_count_for_penalty_and_bonus() -> None:
    equal = [group(4, [1, 1, 1])]
    for chosen in ({"kl_coefficient": 0.1}, {"entropy_coefficient": 0.1}):
        made = trainer(**chosen)
        result = made.train(equal, 0, 1)
        assert (result.skipped, result.without_advantage) == ("", 3)
        assert result.grad_norm > 1e-4


def test_a_bonus_raises_the_entropy() -> None:
    made = trainer(entropy_coefficient=0.5)
    equal = [group(4, [1, 1, 1])]
    first, *_, last = [made.train(equal, step, 1).drift.entropy for step in range(8)]
    assert first is not None
    assert last is not None
    net, values = model(), []
    for each in equal[0].trajectories:
        ids = torch.from_numpy(each.token_ids_T.astype(np.int64))
        logs = torch.log_softmax(net(input_ids=ids[None]).logits[0].detach(), -1)
        entropies = -(logs.exp() * logs).sum(-1)
        values += [float(entropies[place - 1]) for place in np.flatnonzero(each.loss_mask_T)]
    assert first == pytest.approx(np.mean(values), rel=1e-4)
    assert last > first + 0.01


def test_long_rollouts_lose_reward_before_the_advantage_and_not_in_what_is_reported() -> None:
    equal = [group(4, [1, 1, 1, 1])]  # of 3, 4, 5 and 6 tokens
    result = trainer(overlong_buffer=4).train(equal, 0, 1)
    assert (result.skipped, result.reward, result.without_advantage) == ("", 1.0, 0)
    assert trainer(overlong_buffer=2).train(equal, 0, 1).skipped == "no rollout has an advantage"


# -- what is measured


def test_what_is_measured_is_what_the_formulas_say() -> None:
    result = trainer(mask="token", mask_low=0.8, mask_high=1.2).train(GROUPS, 0, 1)
    differences = np.concatenate(
        [(logprobs(model(), t.token_ids_T) - t.logprobs_T)[t.loss_mask_T] for each in GROUPS for t in each.trajectories]
    )
    ratios = np.exp(differences)
    found = result.drift
    assert found.ratios == pytest.approx(tuple(np.percentile(ratios, [1, 50, 99])), rel=1e-2)
    assert found.largest == pytest.approx(ratios.max(), rel=1e-3)
    assert found.effective == pytest.approx(ratios.sum() ** 2 / (ratios**2).sum() / ratios.size, rel=1e-3)
    assert found.mismatch == pytest.approx(np.abs(differences).mean(), rel=1e-3)
    assert found.clipped == pytest.approx(np.mean((ratios < 0.8) | (ratios > 1.2)))
    assert found.masked == pytest.approx(np.mean((ratios < 0.8) | (ratios > 1.2)))
    assert found.engine_kl == pytest.approx(np.mean(ratios - differences - 1), rel=1e-3)
    assert found.engine_tokens == ratios.size
    assert {"ratio_p1", "ratio_p50", "ratio_p99", "ratio_max", "effective", "engine_kl"} <= found.figures().keys()


def test_clipping_by_rollout_is_counted_by_the_rollouts_ratio() -> None:
    result = trainer(loss="gspo", clip_low=0.1, clip_high=0.1).train(GROUPS, 0, 1)
    outside, count = 0, 0
    for each in (t for one_group in GROUPS for t in one_group.trajectories):
        ratio = np.exp((logprobs(model(), each.token_ids_T) - each.logprobs_T)[each.loss_mask_T].mean())
        count += int(each.loss_mask_T.sum())
        outside += int(each.loss_mask_T.sum()) if abs(ratio - 1) > 0.1 else 0
    assert 0 < outside < count
    assert result.drift.clipped == pytest.approx(outside / count)


def test_engine_and_trainer_are_compared_by_tokens_of_the_trained_version_alone() -> None:
    exact = group(7, [1, 0, 1, 0], noise=0.0, step=4)
    older, kept = group(8, [1, 0], step=3), group(9, [1, 0], step=4, kv="kept")
    found = trainer().train([older, exact, kept], 4, 1).drift
    assert found.engine_tokens == sum(int(t.loss_mask_T.sum()) for t in exact.trajectories)
    assert found.engine_kl == pytest.approx(0.0, abs=1e-6)
    for groups, step, incarnation, sampling in (
        ([older, kept], 4, 1, None),
        ([exact], 4, 2, None),  # another incarnation's step of that number
        ([exact], 4, 1, {"top_p": 0.9, "max_new_tokens": 8}),
        ([exact], 4, 1, {"top_k": 5, "max_new_tokens": 8}),
    ):
        found = trainer(sampling=sampling).train(groups, step, incarnation).drift
        assert (found.engine_kl, found.engine_tokens) == (None, 0)
        assert found.figures()["engine_kl"] is None


def test_later_minibatches_compare_nothing_once_the_policy_has_moved() -> None:
    found = trainer(minibatches=3).train(GROUPS, 0, 1).drift
    assert found.engine_tokens == sum(int(t.loss_mask_T.sum()) for t in GROUPS[0].trajectories)
