"""Checks that files and functions stay readable in one go: 400 lines a file, 50 a function."""

import ast
import subprocess
import sys
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 50


def main() -> int:
    """Print what is too long; 1 when anything is."""
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True)  # noqa: S607
    found = [line for name in listed.stdout.split() if Path(name).exists() for line in too_long(Path(name))]
    print("\n".join(found) or "sizes: fine")
    return 1 if found else 0


def too_long(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    found = []
    if text.count("\n") > FILE_LINES:
        found.append(f"{path}: {text.count(chr(10))} lines, at most {FILE_LINES}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}")
    return found


if __name__ == "__main__":
    sys.exit(main())
