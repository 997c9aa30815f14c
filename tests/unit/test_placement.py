"""Every byte of every part has exactly one place, and the parts together are every tensor once: for any layout."""

from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.bulk.deltas import decode_runs, runs_between, runs_of
from weightsync.manifest import ALIGNMENT, DTYPE_BYTES, Layout, TensorSpec
from weightsync.placement import Bytes, Placement, pieces, tensors_in

GAP = -1
layouts = st.builds(
    lambda shapes, parts, chunk: Layout.of(
        [(str(number), dtype, shape) for number, (dtype, shape) in enumerate(shapes)], parts, ALIGNMENT * chunk
    ),
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
        min_size=1,
        max_size=7,
    ),
    st.integers(1, 5),
    st.integers(1, 6),
)


def places_of(layout: Layout, part: int) -> np.ndarray:
    """Of each byte of a part its place in the layout, or `GAP`; made as the module's text says, with torch.chunk."""
    if layout.parts == 1:
        return np.arange(layout.nbytes)
    found = [np.zeros(0, np.int64)]
    for tensor in filter(lambda tensor: tensor.nbytes, layout.tensors):
        rows = torch.arange(tensor.offset, tensor.end).reshape(tensor.shape[0] if tensor.shape else 1, -1)
        for share in rows.chunk(layout.parts)[part : part + 1]:
            found += [share.flatten().numpy(), np.full(-share.numel() % ALIGNMENT, GAP)]
    return np.concatenate(found)


def tensor_at(layout: Layout, place: int) -> TensorSpec | None:
    return next((tensor for tensor in layout.tensors if tensor.offset <= place < tensor.end), None)


def put(placement: Placement, content: Bytes) -> None:
    """Write this through the views of all chunks."""
    at = 0
    for chunk, (start, end) in enumerate(placement.bounds):
        assert start == at
        for view in placement.views(chunk):
            view[:] = content[at : at + len(view)].data
            at += len(view)
        assert at == end
    assert at == len(content)


@given(layouts)
def test_each_byte_of_a_part_has_its_place_and_nothing_else_is_written(layout: Layout) -> None:
    together = np.zeros(layout.nbytes, np.int64)
    for part in range(layout.parts):
        places = places_of(layout, part)
        assert layout.part_nbytes(part) == len(places)
        content = (np.arange(len(places)) % 251 + 1).astype(np.uint8)
        out, expected = np.zeros((2, layout.nbytes), np.uint8)
        put(Placement(layout, part, out), content)
        expected[places[places != GAP]] = content[places != GAP]
        assert np.array_equal(out, expected)
        together += out > 0
    for tensor in layout.tensors:
        assert (together[tensor.offset : tensor.end] == 1).all()
    assert together.max(initial=0) <= 1


@given(layouts)
def test_pieces_are_the_bytes_of_one_tensor_each(layout: Layout) -> None:
    for part in range(layout.parts):
        left = places_of(layout, part)
        for piece in pieces(layout, part):
            places = left[piece.start : piece.start + piece.nbytes]
            assert np.array_equal(places, np.arange(piece.place, piece.place + piece.nbytes))
            if layout.parts > 1:
                assert {tensor_at(layout, place) for place in (places[0], places[-1])} == {piece.tensor}
            left[piece.start : piece.start + piece.nbytes] = GAP
        assert (left == GAP).all()


@given(layouts)
def test_chunks_name_their_tensors_and_dtypes(layout: Layout) -> None:
    out = np.zeros(layout.nbytes, np.uint8)
    for part in range(layout.parts):
        places = places_of(layout, part)
        runs_on_wire = runs_of(layout, part)
        marks = decode_runs(runs_on_wire) if runs_on_wire else []
        for chunk, (start, end) in enumerate(Placement(layout, part, out).bounds):
            owners = [tensor_at(layout, place) for place in places[start:end]]
            assert tensors_in(layout, part, chunk) == [tensor for tensor, _ in groupby(filter(None, owners))]
            runs = [*runs_between(marks, start, end)]
            assert [first for first, _, _ in runs] == [0, *(last for _, last, _ in runs[:-1])]
            assert runs[-1][1] == end - start
            assert all(one[2] != next_[2] for one, next_ in pairwise(runs))
            for first, last, dtype in runs:
                assert last > first
                assert {owner.dtype for owner in owners[first:last] if owner} == {dtype}
