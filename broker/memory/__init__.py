"""The broker inside one process: for tests and capacity planning. It passes the same tests as the one on Redis."""

from broker.memory.runs import MemoryRuns

__all__ = ["MemoryRuns"]
