"""Which host this is: what processes with the same name may share memory."""

from __future__ import annotations

import os
import socket

HOST_VARIABLE = "HEADRACE_HOST"


def host_name() -> str:
    """That of the machine, unless the environment gives it another one (as for containers of one machine)."""
    return os.environ.get(HOST_VARIABLE) or socket.gethostname()
