"""Kept and dropped groups are counted alike: by length, by reward, by environment."""

from __future__ import annotations

from consumers.tally import Tally
from headrace.telemetry.metrics import Metrics
from tests.groups import group, trajectory


def test_kept_and_dropped_by_length_and_reward() -> None:
    metrics = Metrics("r", "trainer")
    tally = Tally(metrics, ("sums", "logic"))
    tally.count(group(trajectory(*[1] * 20, reward=0.2), trajectory(*[1] * 5, reward=1.0)), "trained")
    tally.count(group(outcome="stale", stopped=(300, 40), environment="logic"), "stale")
    tally.count(group(outcome="dead", environment="what nobody configured"), "dead")
    assert tally.take() == {
        "groups": {"stale": 1, "dead": 1, "trained": 1},
        "tokens": {"stale": {"64": 1, "512": 1}, "trained": {"16": 1, "32": 1}},
        "rewards": {"trained": {"0.25": 1, "1": 1}},
        "environments": {"logic": {"stale": 1}, "other": {"dead": 1}, "sums": {"trained": 1}},
    }
    assert tally.take()["groups"] == {}, "each is told of once"
    text = metrics.render().decode()
    assert 'headrace_trainer_groups_total{environment="logic",run="r",service="trainer",verdict="stale"} 1.0' in text, (
        text
    )
    assert 'headrace_trainer_rollout_tokens_sum{environment="logic",run="r",service="trainer",verdict="stale"}' in text
    assert 'headrace_trainer_rollout_reward_bucket{environment="sums",le="0.25"' in text
    assert "what nobody configured" not in text, "a label is never what came over the wire"


def test_tokens_that_were_masked_count_for_the_length_of_a_rollout() -> None:
    tally = Tally(Metrics("r", "trainer"), ("sums",))
    tally.count(group(trajectory(*[1] * 40, masked=tuple(range(30)))), "trained")
    taken = tally.take()
    assert taken["tokens"] == {"trained": {"64": 1}}
    assert "environments" not in taken, "one environment needs no table"
