"""What trainer and engines of one device need of its memory, and what is said where it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.config import Config
from headrace.errors import ConfigError, ModelError
from headrace.policy import footprint
from headrace.policy.footprint import Footprint, check_memory
from headrace.telemetry.arithmetic import Shape

SHAPE = Shape(linear=800, head=100, parameters=1000, layers=2, query_width=8, kv_width=4)
GIB = 1 << 30


def config(placement: str, **sections: dict[str, object]) -> Config:
    tree = {"run": {"placement": placement}, "model": {"context_length": 100}, "sampling": {"max_new_tokens": 10}}
    tree["producer"] = {"slots": 8}
    tree["trainer"] = {"token_budget": 64}
    return Config.model_validate({name: {**tree.get(name, {}), **sections.get(name, {})} for name in tree})


def test_it_is_what_the_arithmetic_says() -> None:
    made = footprint.footprint(config("hybrid"), SHAPE, 10, 20, "cpu")
    assert made == Footprint(
        trainer=12 * 1000,
        step=4 * 1000 + 2 * (8 * 10 + 4 * 20) * 2 * 64,
        engines=2 * 2 * 1000,
        cache=2 * 2 * 4 * 8 * 100 * 2,
        segments=3 * 2 * 1000,
    )
    assert footprint.footprint(config("hybrid"), SHAPE, 10, 20, "cuda:0").segments == 0
    two = footprint.footprint(config("hybrid", producer={"count": 2}), SHAPE, 10, 20, "cpu")
    assert (two.engines, two.cache, two.producers) == (2 * made.engines, made.cache, 2)
    frugal = config("hybrid", trainer={"activation_checkpointing": True, "kl_coefficient": 0.1, "autocast": "off"})
    assert footprint.footprint(frugal, SHAPE, 10, 20, "cpu").step == 4 * 1000 + 4 * 10 * 2 * 64
    assert footprint.footprint(frugal, SHAPE, 10, 20, "cpu").trainer == 16 * 1000
    simulated = footprint.footprint(config("hybrid", producer={"engine": "scripted"}), SHAPE, 10, 20, "cpu")
    assert (simulated.engines, simulated.cache) == (0, 0)


def test_in_turns_a_step_and_the_caches_are_never_there_together() -> None:
    need = Footprint(trainer=100, step=30, engines=40, cache=20, segments=10, producers=2)
    assert need.needed("hybrid") == 100 + 40 + 10 + 30 + 2 * 20
    assert need.needed("colocated") == 100 + 40 + 10 + 30
    assert Footprint(100, 30, 40, 50, 10, 2).needed("colocated") == 100 + 40 + 10 + 50


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        ("hybrid", 'take run.placement = "colocated", which needs less, or less of producer.slots'),
        ("colocated", "(keys and values are never there with a step); take less of producer.slots"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_parts(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, placement: str, said: str
) -> None:
    check_memory(config(placement), tiny_model, "cpu")
    monkeypatch.setattr(footprint, "available", lambda device: 1000)
    check_memory(config("disaggregated"), tiny_model, "cpu")
    with pytest.raises(ConfigError) as refused:
        check_memory(config(placement), tiny_model, "cpu")
    for part in (f"run.placement: {placement!r} needs at least 0.00 GB on cpu", "weights and optimizer of the", said):
        assert part in str(refused.value)


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = footprint.available("cpu")
    assert free > GIB // 8
    monkeypatch.setattr(footprint, "LIMIT", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text("max\n")
    assert footprint.available("cpu") > GIB // 8
    (tmp_path / "memory.max").write_text("1048576\n")
    assert footprint.available("cpu") == 1048576


def test_a_gpu_that_is_not_there_is_one_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(ModelError, match=r"model\.device = 'cuda' does not say how much memory it has"):
        footprint.available("cuda")
