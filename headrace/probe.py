"""`python -m headrace.probe`: whether the service of this container serves, for a health check.

Asks /healthz at HEADRACE_METRICS_PORT on loopback, prints the answer, and exits 0 for a service that is well. Of one
that has failed it prints the last words (`headrace.container`). With `--wait SECONDS` it waits so long for a service
that is still starting, which one that loads on a busy machine may be too slow to say.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time

from headrace.container import ENDED, LAST_WORDS, SERVED

PATIENCE_S = 5.0
LOOK_S = 0.25
LONGEST = 64 << 10


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m headrace.probe", description=__doc__, allow_abbrev=False)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds that a start may take (default: 0)")
    wait = parser.parse_args(arguments).wait
    port = os.environ.get("HEADRACE_METRICS_PORT", "")
    if not port.isdecimal():
        print("HEADRACE_METRICS_PORT is not set to the port of /healthz", file=sys.stderr)
        return 2
    until = time.monotonic() + wait
    while True:
        code, said = ask(int(port))
        if code is None and time.monotonic() < until:
            # A start tells nobody when it is over.
            time.sleep(LOOK_S)
            continue
        if code == 0 and wait:
            SERVED.touch()
        print(said)
        return 1 if code is None else code


def ask(port: int) -> tuple[int | None, str]:
    """The exit code and what to print; None for a service that is still starting."""
    if ENDED.exists():
        return 0, "the service has ended, and waits to be told to leave"
    if LAST_WORDS.exists():
        return 1, LAST_WORDS.read_text(encoding="utf-8").strip()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        said = answer.read(LONGEST).decode("utf-8", "replace")
    except ConnectionRefusedError:
        return None, f"nothing serves on port {port}: the service still starts, or has ended"
    except (OSError, http.client.HTTPException) as error:
        loads = isinstance(error, TimeoutError) and not SERVED.exists()
        return None if loads else 1, f"no answer on port {port}: {error}"
    finally:
        connection.close()
    if answer.status == http.client.OK:
        return 0, said
    return (None if starting(said) else 1), said


def starting(said: str) -> bool:
    try:
        health = json.loads(said)
    except ValueError:
        return False
    return isinstance(health, dict) and bool(health.get("starting"))


if __name__ == "__main__":
    sys.exit(main())
