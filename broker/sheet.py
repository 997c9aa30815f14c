"""The balance sheet from its counters. Pure; both brokers keep counters under the same names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from broker.api import Balance
from broker.messages import TaskKind


def balances(kinds: Iterable[TaskKind], counts: Mapping[str, int], outstanding: Mapping[str, int]) -> list[Balance]:
    """One balance per kind that ever had a task, and always one for "train".

    Counters are named "<kind> admitted", "<kind> v <verdict>" and "<kind> r <verdict>: <reason>".
    """
    found = []
    for kind in kinds:
        verdicts = _under(counts, f"{kind} v ")
        admitted = counts.get(f"{kind} admitted", 0)
        if kind == "train" or admitted or verdicts or outstanding.get(kind):
            reasons = _under(counts, f"{kind} r ")
            found.append(Balance(kind, admitted, outstanding.get(kind, 0), verdicts, reasons))
    return found


def _under(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): number for name, number in sorted(counts.items()) if name.startswith(prefix)}
