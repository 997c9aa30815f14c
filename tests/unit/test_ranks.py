"""How a batch is shared between ranks, and what goes to each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from consumers.drift import Measured
from consumers.losses.tokens import Denominators
from consumers.packing import FILLING, Sample, balanced, pack, pack_shares
from consumers.ranks.orders import DTYPES, Train, decode, encode, rows_in, update_of
from headrace.config import Config
from tests.unit.test_packing import groups


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_shares_hold_all_and_no_two_differ_by_more_than_one_of_theirs(sizes: list[int], shares: int) -> None:
    found = balanced(sizes, shares)
    assert sorted(i for share in found for i in share) == list(range(len(sizes)))
    assert all(share == sorted(share) for share in found)
    loads = [sum(sizes[i] for i in share) for share in found]
    for load, share in zip(loads, found, strict=True):
        # What came last went where the least was.
        assert load - min(sizes[i] for i in share) <= min(loads) if share else load == 0


@given(groups(), st.integers(2, 4), st.integers(8, 40))
def test_ranks_have_equally_many_rows_and_together_every_target_once(
    drawn: list[list[Sample]], ranks: int, budget: int
) -> None:
    def targets(rows: list) -> list[tuple[int, float, float]]:  # type: ignore[type-arg]
        return sorted(
            (int(token), float(advantage), float(length))
            for row in rows
            if not row.is_filling
            for token, advantage, length in zip(row.targets_N, row.advantages_N, row.lengths_N, strict=True)
        )

    shares = pack_shares(drawn, budget, ranks)
    assert len({len(rows) for rows in shares}) == 1
    assert targets([row for rows in shares for row in rows]) == targets(pack(drawn, budget))
    assert pack_shares(drawn, budget, 1)[0] == [] or shares[0] != []


@given(groups(), st.integers(8, 40))
def test_a_share_arrives_as_it_was_sent(drawn: list[list[Sample]], budget: int) -> None:
    rows = [*pack(drawn, budget), FILLING]
    sent = Train(7, [update_of(rows, Denominators(3, 20, 8))])
    came = decode(encode(sent))
    assert isinstance(came, Train)
    assert (came.step, came.updates[0].rollouts, came.updates[0].tokens, came.updates[0].max_tokens) == (7, 3, 20, 8)
    for row, other in zip(rows, rows_in(came.updates[0]), strict=True):
        assert row.blocks == other.blocks
        assert row.is_filling == other.is_filling
        for name, dtype in DTYPES.items():
            array = getattr(other, name)
            assert array.dtype == dtype
            assert array.flags.writeable
            np.testing.assert_array_equal(getattr(row, name), array)


def test_what_a_rank_measured_arrives_as_it_was_sent() -> None:
    sent = Measured(np.array([0.5, -2.0], np.float32), np.zeros(0, np.float32), {"clipped": 2.0})
    came = Measured.decode(sent.encode())
    np.testing.assert_array_equal(came.log_ratios_N, sent.log_ratios_N)
    assert (came.engine_N.size, came.sums) == (0, {"clipped": 2.0})


def test_more_ranks_than_an_update_has_groups_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"trainer.ranks: 5 is more than the 4 groups of an optimizer update"):
        Config.model_validate({"trainer": {"ranks": 5, "groups_per_step": 8, "minibatches": 2}})
    with pytest.raises(ValidationError, match=r"2 ranks need a device each, and run.placement = 'hybrid' has one"):
        Config.model_validate({"trainer": {"ranks": 2}, "run": {"placement": "hybrid"}})
    assert Config.model_validate({"trainer": {"ranks": 4, "groups_per_step": 8, "minibatches": 2}}).trainer.ranks == 4
