"""The policy version: which weights a token was sampled from."""

from __future__ import annotations

from typing import NamedTuple


class PolicyVersion(NamedTuple):
    """`(incarnation, step)`, ordered.

    A trainer that starts or resumes takes a new incarnation; `step` counts optimizer steps and goes on
    across incarnations. Written as ``"2.140"`` in keys, logs and file names.
    """

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """The inverse of `str`. Raises ValueError for anything else."""
        incarnation, _, step = text.partition(".")
        return cls(int(incarnation), int(step))
