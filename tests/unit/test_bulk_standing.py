"""What is known of peers: rates, whether a delta pays, whom to trust."""

from __future__ import annotations

import pytest

from weightsync.bulk.standing import BAD_CHUNKS, MAX_PEERS, QUARANTINE_S, Standing

GB = 1e9


def test_rates_follow_what_is_measured_per_peer() -> None:
    standing = Standing()
    assert standing.rate("a") == 0.0
    standing.sent("a", 1000, 1.0)
    assert standing.rate("a") == pytest.approx(1000)
    for _ in range(50):
        standing.sent("a", 1000, 0.5)
    assert standing.rate("a") == pytest.approx(2000, rel=0.01)
    assert standing.rate("b") == 0.0


def test_a_delta_pays_on_a_slow_wire_and_not_on_a_fast_one() -> None:
    standing = Standing()
    assert standing.delta_pays("new", 1 << 30), "nothing is measured"
    for address, bytes_per_s in (("slow", 0.1 * GB), ("fast", 5 * GB)):
        standing.sent(address, 1 << 22, (1 << 22) / bytes_per_s)
        standing.changed(address, 1 << 22, 50_000, encode_s=(1 << 22) / GB, apply_s=(1 << 22) / (2 * GB))
    assert standing.delta_pays("slow", 1 << 30)
    assert not standing.delta_pays("fast", 1 << 30)


def test_a_dense_delta_does_not_pay() -> None:
    standing = Standing()
    standing.sent("a", 1 << 22, (1 << 22) / GB)
    for _ in range(50):
        standing.changed("a", 1 << 22, (1 << 22) - 1, encode_s=0.001, apply_s=0.001)
    assert not standing.delta_pays("a", 1 << 30)


def test_encoding_that_costs_nothing_counts_as_nothing() -> None:
    standing = Standing()
    standing.sent("a", 1 << 22, (1 << 22) / GB)
    standing.changed("a", 1 << 22, 50_000, encode_s=0.0, apply_s=(1 << 22) / (20 * GB))
    assert standing.delta_pays("a", 1 << 30)


def test_a_peer_with_bad_chunks_is_left_alone_for_a_while() -> None:
    standing = Standing()
    for count in range(BAD_CHUNKS):
        assert standing.trusted("a", 100.0), count
        standing.bad("a", 100.0)
    assert not standing.trusted("a", 100.0 + QUARANTINE_S - 1)
    assert standing.trusted("a", 100.0 + QUARANTINE_S)
    assert standing.trusted("b", 100.0)
    standing.bad("a", 200.0)
    assert standing.trusted("a", 200.0), "it begins anew"


def test_peers_are_bounded() -> None:
    standing = Standing()
    for number in range(MAX_PEERS + 10):
        standing.sent(f"a{number}", 1, 1.0)
    assert standing.rate("a0") == 0.0
    assert standing.rate(f"a{MAX_PEERS + 9}") == 1.0
