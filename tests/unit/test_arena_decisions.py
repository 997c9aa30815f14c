"""Which segments are freed, and which staged version gives way: pure decisions and what always holds of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.version import PolicyVersion
from weightsync.retention import Held, freeable
from weightsync.staging import LAST_BACKOFF_S, backoff_s, gives_way, rounds

versions = st.builds(PolicyVersion, st.integers(0, 3), st.integers(0, 6))
held_lists = st.lists(st.tuples(versions, st.booleans()), max_size=10, unique_by=lambda item: item[0]).map(
    lambda items: [Held(f"segment-{version}", version, alive) for version, alive in items]
)


@given(held_lists, st.none() | versions, st.sets(versions, max_size=4))
def test_nothing_needed_is_freed_and_nothing_useless_is_kept(
    held: list[Held], head: PolicyVersion | None, leased: set[PolicyVersion]
) -> None:
    freed = {item.name for item in freeable(held, head, leased)}
    for item in held:
        being_filled = item.owner_alive and (head is None or item.version > head)
        assert (item.name not in freed) == (item.version in leased or item.version == head or being_filled)


@given(held_lists, versions, st.sets(versions, max_size=4))
def test_without_a_living_owner_only_the_head_and_leased_versions_stay(
    held: list[Held], head: PolicyVersion, leased: set[PolicyVersion]
) -> None:
    dead = [Held(item.name, item.version, False) for item in held]
    going = freeable(dead, head, leased)
    staying = {item.version for item in dead if item not in going}
    assert staying <= leased | {head}


@given(st.integers(0, 10_000), st.integers(1, 3000))
def test_rounds_cover_every_byte_once(nbytes: int, round_bytes: int) -> None:
    parts = list(rounds(nbytes, round_bytes))
    assert [byte for start, end in parts for byte in range(start, end)] == list(range(nbytes))
    assert all(0 < end - start <= round_bytes for start, end in parts)


@given(versions, st.none() | versions, st.integers(0, 100), st.integers(0, 3))
def test_staging_gives_way_only_to_a_newer_version_early_and_once_in_a_row(
    staging: PolicyVersion, newest: PolicyVersion | None, staged: int, skips: int
) -> None:
    expected = newest is not None and newest > staging and staged < 50 and skips == 0
    assert gives_way(staging, newest, staged, 100, skips) == expected


@given(st.integers(-3, 2000))
def test_backoff_grows_and_is_bounded(failures: int) -> None:
    assert 0 <= backoff_s(failures) <= backoff_s(failures + 1) <= LAST_BACKOFF_S
    assert failures <= 0 or backoff_s(failures) > 0
