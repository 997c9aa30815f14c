"""Whether a producer and a run mean the same model, tokenizer, chat template and wire. Pure."""

from __future__ import annotations

from broker.api import Hello, RunRecord


def difference(record: RunRecord, hello: Hello) -> str:
    """What differs, with both values; empty when nothing does."""
    if hello.schema != record.schema:
        return f"it speaks wire schema {hello.schema}, the run {record.schema}; install the same release on both"
    found = [
        f"{name.replace('_', ' ')} {_short(hello.digests.get(name))}, the run has {_short(record.digests.get(name))}"
        for name in sorted(record.digests.keys() | hello.digests.keys())
        if (hello.digests.get(name) or "") != (record.digests.get(name) or "")
    ]
    return "; ".join(found)


def _short(digest: str | None) -> str:
    return digest[:16] if digest else "(none)"
