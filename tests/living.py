"""The processes of this machine that answer a question, while others come and go."""

from collections.abc import Callable

import psutil


def living(wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """Those that a question is true of; one that ends meanwhile, has ended, or may not be asked is none of them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and wanted(process):
                found.append(process)
        except (psutil.Error, ProcessLookupError):
            continue
    return found
