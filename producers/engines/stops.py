"""Stop strings: does the newest token complete one?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
SLACK = 8
"""Tokens beyond a stop string's bytes: the first of a window may lose its leading space, some have no text."""


def completes_stop(tokens: Sequence[int], stop: Sequence[str], decode: Decode) -> bool:
    """Whether the text of `tokens` contains one of `stop`, given that it did not without the last token.

    Each token has at least one byte, so a stop string ends within as many tokens as it has bytes: only that window
    is decoded.
    """
    window = max((len(text.encode()) for text in stop), default=0) + SLACK
    text = decode(list(tokens[-window:]))
    return any(one in text for one in stop if one)
