"""What a receiver tells of the versions that it brought into its engine."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class Commit:
    """One version's way into the engine. Seconds each."""

    version: PolicyVersion
    nbytes: int
    """That were brought; 0 of one that is read in place."""
    fetch_s: float
    """From the first chunk to the last, digests and rests included."""
    verify_s: float
    """From then on until it was sealed and its digests were compared."""
    commit_s: float
    """How long decoding stood still, as the engine says."""
    latency_s: float
    """From the seal to the end of the commit; exact on one host, else off by the difference of the clocks."""
    sealed_at: float = 0.0
    """Seconds since the epoch, like the next ones, but by the clock of the trainer's host."""
    arrived_at: float = 0.0
    """When its first chunk was fetched."""
    verified_at: float = 0.0
    ended_at: float = 0.0
    """When decoding went on with it."""


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """Counters since start; a reader takes differences."""

    commits: int = 0
    staged_bytes: int = 0
    fetch_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    last_latency_s: float = 0.0
    skipped: int = 0
    """Versions whose staging was dropped for a newer one."""
    vanished: int = 0
    """Versions that were freed before or while they were read."""
    damaged: int = 0
    """Versions with a digest that did not match; never committed."""
    refused: int = 0
    """Manifests that are not valid, not those of this run and version, or not those of what was staged."""
