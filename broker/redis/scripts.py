"""The Lua scripts: each file is a noun's verb; here they get what all of them share.

A script file begins with comments that say what it needs: `KEYS record a b` names its keys (in Lua, local variables
of these names), `FENCED` lets only the trainer in, `ALWAYS` makes it work when Redis is at maxmemory (a script that
has written with an allowed command slips past the limit), `ALONE` leaves out all of that.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

_KEYS = re.compile(r"^-- KEYS ([a-z ]+)$", re.MULTILINE)
_SLIP = "redis.call('DEL', KEYS[1] .. ':none')\n"


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    text: str
    sha: str
    """What EVALSHA calls it."""
    keys: tuple[str, ...]
    """Nouns of its keys, in order."""
    fenced: bool


@cache
def scripts() -> dict[str, Script]:
    """All scripts by name, ready to be sent."""
    folder = resources.files("broker.redis") / "lua"
    files = {file.name.removesuffix(".lua"): file.read_text("utf-8") for file in folder.iterdir()}
    shared = {name: files.pop(name) for name in ("prelude", "fence", "epilogue")}
    return {name: _compose(name, text, shared) for name, text in files.items()}


def _compose(name: str, text: str, shared: dict[str, str]) -> Script:
    found = _KEYS.search(text)
    assert found, f"{name}.lua does not name its keys"
    keys = tuple(found.group(1).split())
    fenced = "\n-- FENCED\n" in text
    if "\n-- ALONE\n" not in text:
        locals_ = "".join(f"local {key} = KEYS[{n}]\n" for n, key in enumerate(keys, 1) if n > 1)
        slip = _SLIP if "\n-- ALWAYS\n" in text else ""
        fence = shared["fence"] if fenced else ""
        text = (
            f"{shared['prelude']}\n{locals_}{slip}{fence}"
            f"local function run()\n{text}end\nlocal answer = run()\n{shared['epilogue']}return answer\n"
        )
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), keys, fenced)
