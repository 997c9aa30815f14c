"""What a server says of itself, and which means and modes that allows; buckets of bounded size."""

from __future__ import annotations

import itertools
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError, WeightError
from producers.engines.remote.spans import Kv
from producers.engines.remote.updating import deadline_s, on_this_host
from producers.engines.sglang.collective import address_towards
from producers.engines.sglang.loading import (
    SLOWEST_BY,
    Capabilities,
    candidates,
    described,
    refuse_mode,
)
from producers.engines.sglang.tensor import buckets, with_last
from weightsync.manifest import Layout

ROUTES = frozenset(
    {
        "/pause_generation",
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/update_weights_from_distributed",
        "/begin_weight_update",
        "/end_weight_update",
    }
)


def server(routes: frozenset[str] = ROUTES, *, same_host: bool = True, **info: Any) -> Capabilities:
    return described(routes, {"version": "0.5.23", "device": "cpu", **info}, same_host=same_host)


def test_what_a_server_answers_is_read_and_what_it_leaves_out_is_as_it_starts() -> None:
    said = server(dtype="half", tp_size=2, disable_overlap_schedule=True, device="cuda:0", load_format="dummy")
    assert (said.dtype, said.tp_size, said.overlap_schedule, said.device) == ("float16", 2, False, "cuda")
    assert (said.load_format, said.sessions, said.version) == ("dummy", True, "0.5.23")
    plain = described(frozenset(), {}, same_host=False)
    assert (plain.dtype, plain.tp_size, plain.dp_size, plain.overlap_schedule) == ("auto", 1, 1, True)
    assert (plain.device, plain.version, plain.sessions) == ("cuda", "unknown", False)


def test_a_folder_where_memory_is_shared_else_a_group_else_the_request_itself() -> None:
    assert candidates("auto", server()) == ["folder", "collective", "tensor"]
    assert candidates("auto", server(same_host=False)) == ["collective", "tensor"]
    assert candidates("auto", server(ROUTES - {"/init_weights_update_group"}, same_host=False)) == ["tensor"]
    assert candidates("auto", server(dp_size=2)) == ["folder"]
    assert candidates("tensor", server()) == ["tensor"]


def test_means_that_a_server_has_not_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match='means = "folder": the server runs on another host; set means = "auto"'):
        candidates("folder", server(same_host=False))
    with pytest.raises(ConfigError, match=r"this server \(SGLang 0.5.23\) has no /update_weights_from_tensor"):
        candidates("tensor", server(ROUTES - {"/update_weights_from_tensor"}))
    with pytest.raises(ConfigError, match="the server runs 2 data-parallel copies, which take no single tensors"):
        candidates("collective", server(dp_size=2))
    with pytest.raises(ConfigError, match=r"cannot be updated \(folder: .*; collective: .*; tensor: .*use SGLang"):
        candidates("auto", server(frozenset()))


@pytest.mark.parametrize("kv", ["keep", "recompute", "resume"])
def test_only_keeping_needs_a_server_without_overlap(kv: Kv) -> None:
    refuse_mode(kv, server(disable_overlap_schedule=True))
    if kv == "keep":
        with pytest.raises(ConfigError, match=r'kv = "keep" needs .* --disable-overlap-schedule, or set kv = "recomp'):
            refuse_mode(kv, server())
    else:
        refuse_mode(kv, server())
    with pytest.raises(ConfigError, match="cannot pause"):
        refuse_mode(kv, server(ROUTES - {"/pause_generation"}, disable_overlap_schedule=True))


def test_a_deadline_grows_with_the_version_and_is_longer_where_it_comes_slower() -> None:
    layout = Layout.of([("w", "float32", (50 << 18,))])
    assert [deadline_s(layout, 60.0, SLOWEST_BY[means]) for means in ("folder", "collective", "tensor")] == [
        61.0,
        62.5,
        85.0,
    ]


def test_which_host_this_is() -> None:
    assert on_this_host("http://127.0.0.1:30000")
    assert on_this_host("http://localhost:30000/v1")
    assert on_this_host("http://[::1]:30000")
    # Addresses that are for documentation are nobody's.
    assert not on_this_host("http://192.0.2.1:30000")
    assert not on_this_host("http://no-such-host.invalid:30000")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("127.0.0.1", 9))
        assert address_towards("http://127.0.0.1:30000") == probe.getsockname()[0]
    with pytest.raises(WeightError, match=r"there is no way to no-such-host\.invalid"):
        address_towards("http://no-such-host.invalid:30000")


LAYOUTS = st.lists(st.tuples(st.sampled_from(["float32", "bfloat16"]), st.integers(1, 40)), min_size=1, max_size=20)


@given(LAYOUTS, st.integers(1, 200), st.booleans())
def test_buckets_hold_all_in_order_and_are_bounded(shapes: list[tuple[str, int]], nbytes: int, one_dtype: bool) -> None:
    specs = Layout.of([(f"t{at}", dtype, (size,)) for at, (dtype, size) in enumerate(shapes)]).tensors
    found = list(with_last(buckets(specs, nbytes, one_dtype=one_dtype)))
    assert [spec for bucket, _ in found for spec in bucket] == list(specs)
    assert [last for _, last in found] == [False] * (len(found) - 1) + [True]
    for bucket, _ in found:
        assert len(bucket) == 1 or sum(spec.nbytes for spec in bucket) <= nbytes
        assert not one_dtype or len({spec.dtype for spec in bucket}) == 1
    for (first, _), (second, _) in itertools.pairwise(found):
        more = sum(spec.nbytes for spec in first) + second[0].nbytes > nbytes
        assert more or (one_dtype and first[-1].dtype != second[0].dtype)
