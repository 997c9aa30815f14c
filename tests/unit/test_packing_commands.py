"""Commands become the same bytes as by redis-py itself, whichever way they are packed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import DataError

from broker.redis.packing import LARGE, PACKING

ARGUMENTS = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.binary(max_size=20),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([b"x" * (LARGE - 1), b"x" * (LARGE + 1)]),
)


@pytest.mark.parametrize("name", ["EVALSHA", "SCRIPT LOAD"])
@pytest.mark.parametrize("kind", [Connection, SSLConnection, UnixDomainSocketConnection])
@given(arguments=st.lists(ARGUMENTS, max_size=12))
def test_a_command_has_the_bytes_that_redis_py_gives_it(
    name: str, kind: type[Connection], arguments: list[str | bytes | int]
) -> None:
    packed = PACKING[kind]().pack_command(name, *arguments)
    assert b"".join(packed) == b"".join(kind().pack_command(name, *arguments))


def test_a_large_body_is_not_copied() -> None:
    body = b"x" * (LARGE + 1)
    assert any(part is body for part in PACKING[Connection]().pack_command("XADD", "key", "*", "body", body))


def test_what_is_no_argument_is_refused_as_by_redis_py() -> None:
    with pytest.raises(DataError):
        PACKING[Connection]().pack_command("GET", None)
