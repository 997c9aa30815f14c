"""Orders: what rank 0 has the others do, and a share of a batch, as bytes: msgpack, with arrays as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import msgspec
import numpy as np

from consumers.losses.tokens import Denominators
from consumers.packing import Row
from headrace.policy.blocks import Block

DTYPES = {
    "token_ids_T": np.int64,
    "positions_T": np.int64,
    "sources_N": np.int64,
    "targets_N": np.int64,
    "behaviour_N": np.float32,
    "advantages_N": np.float32,
    "lengths_N": np.float32,
    "rollouts_N": np.int64,
    "current_N": np.bool_,
}
"""Of the arrays of a row."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Load the model, and the checkpoint of this folder where one is named."""

    incarnation: int
    checkpoint: str = ""


class Update(msgspec.Struct, frozen=True):
    """One optimizer update: this rank's rows, and the denominators of all."""

    rows: list[tuple[list[tuple[int, int, tuple[int, ...]]], dict[str, bytes]]]
    rollouts: int
    tokens: int
    max_tokens: int


class Train(msgspec.Struct, frozen=True, tag=True):
    """Make a step, which trains version `step`."""

    step: int
    updates: list[Update]


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Take the weights that rank 0 is about to spread."""


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Bring the weights together, at rank 0."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write what this rank has of a checkpoint into this folder, while steps go on."""

    folder: str


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Publish this rank's part of the weights."""

    version: tuple[int, int]


class End(msgspec.Struct, frozen=True, tag=True):
    """Leave."""


Order = Begin | Train | Restore | Gather | Save | Publish | End
_decoder = msgspec.msgpack.Decoder(Order)


def encode(order: Order) -> bytes:
    return msgspec.msgpack.encode(order)


def decode(data: bytes) -> Order:
    return _decoder.decode(data)


def update_of(rows: Sequence[Row], denominators: Denominators) -> Update:
    packed = [
        (
            [(block.start, block.prefix, block.suffixes) for block in row.blocks],
            {name: getattr(row, name).tobytes() for name in DTYPES},
        )
        for row in rows
    ]
    return Update(packed, denominators.rollouts, denominators.tokens, denominators.max_tokens)


def rows_in(update: Update) -> list[Row]:
    """With arrays that may be written to, as torch wants them."""
    return [
        Row(
            blocks=tuple(Block(*block) for block in blocks),
            **{name: np.frombuffer(bytearray(arrays[name]), dtype) for name, dtype in DTYPES.items()},
        )
        for blocks, arrays in update.rows
    ]


assert {field.name for field in fields(Row)} == {"blocks", *DTYPES}
