"""What is refused before a vLLM server loads a version, and how its checksums are read."""

from __future__ import annotations

import hashlib

import pytest

from producers.engines.openai.updates import ROUTES, by_rank, lack, mismatch
from producers.engines.remote.checksums import Rank
from producers.engines.remote.forms import Shard
from weightsync.manifest import Layout

NOTHING = hashlib.sha256().hexdigest()
SOME = "a" * 64
RANK = "dp0:pp0:pcp0:tp0:"
NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.norm.weight",
)
SERVER = {
    RANK + "model.embed_tokens.weight": SOME,
    RANK + "model.layers.0.self_attn.qkv_proj.weight": SOME,
    RANK + "model.norm.weight": SOME,
}


def layout(*names: str) -> Layout:
    return Layout.of([(name, "float32", (4, 4)) for name in names])


def test_a_server_with_all_routes_on_this_host_can_be_updated() -> None:
    assert lack((*ROUTES, "/health"), same_host=True) is None


@pytest.mark.parametrize("route", ROUTES)
def test_a_route_that_is_missing_is_named(route: str) -> None:
    fault = lack(set(ROUTES) - {route}, same_host=True)
    assert fault is not None
    assert fault.startswith(f"it has no {route}; start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1")


def test_another_host_has_not_the_folder() -> None:
    assert "another host" in (lack(ROUTES, same_host=False) or "")


def test_the_same_model_is_no_mismatch() -> None:
    assert mismatch(layout(*NAMES), SERVER) is None


def test_what_only_the_server_has_would_stay_old() -> None:
    fault = mismatch(layout(*NAMES[:-1]), SERVER)
    assert fault is not None
    assert fault.startswith("the version has nothing for 1 of the server's tensors (model.norm.weight, …)")
    assert "qkv_proj" in (mismatch(layout(*NAMES[:2], NAMES[-1]), SERVER) or "")


def test_what_only_the_version_has_would_be_passed_over() -> None:
    fault = mismatch(layout(*NAMES, "model.extra.weight"), SERVER)
    assert fault is not None
    assert fault.startswith("the server has no tensor for 1 of the version's (model.extra.weight, …)")


def test_a_tied_head_on_a_cpu_is_refused_and_an_untied_one_is_not() -> None:
    packed = SERVER | {RANK + "model.layers.0.self_attn.qkv_proj.weight": NOTHING}
    assert "a reload leaves old" in (mismatch(layout(*NAMES), packed) or "")
    untied = packed | {RANK + "lm_head.weight": SOME}
    assert mismatch(layout(*NAMES, "lm_head.weight"), untied) is None


def test_checksums_are_told_apart_by_rank_and_what_has_no_bytes_is_left_out() -> None:
    answer = by_rank(
        {
            "dp0:pp0:pcp0:tp0:model.norm.weight": SOME,
            "dp0:pp0:pcp0:tp1:model.norm.weight": "b" * 64,
            "dp0:pp0:pcp0:tp1:model.x.weight": NOTHING,
        }
    )
    assert answer == [
        Rank({"model.norm.weight": "a" * 16}, Shard(0, 2)),
        Rank({"model.norm.weight": "b" * 16}, Shard(1, 2)),
    ]
