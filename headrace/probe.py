"""`python -m headrace.probe`: whether the service of this container serves, for a health check.

Asks /healthz at HEADRACE_METRICS_PORT on loopback, prints the answer, and exits 0 for a service that is well.
"""

from __future__ import annotations

import http.client
import os
import sys

PATIENCE_S = 5.0
LONGEST = 64 << 10


def main() -> int:
    port = os.environ.get("HEADRACE_METRICS_PORT", "")
    if not port.isdecimal():
        print("HEADRACE_METRICS_PORT is not set to the port of /healthz", file=sys.stderr)
        return 2
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=PATIENCE_S)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        print(answer.read(LONGEST).decode("utf-8", "replace"))
        return 0 if answer.status == http.client.OK else 1
    except OSError as error:
        print(f"nothing serves on port {port}: {error}")
        return 1
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
