"""What DCGM's exporter says of a device, where one serves on this host.

It knows what NVML does not: whether tensor cores and memory were busy, not only that some kernel ran. Which of its
profiling fields it serves is its own configuration.
"""

from __future__ import annotations

import http.client
import logging
import os
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

log = logging.getLogger(__name__)

URL_VARIABLE = "HEADRACE_DCGM_URL"
"""Where the exporter serves; empty asks nobody."""
URL = "http://127.0.0.1:9400/metrics"
"""The exporter's own default."""
WAIT_S = 0.5
LARGEST = 8 << 20
"""Bytes of an answer that are read."""
FIELDS = {
    "DCGM_FI_PROF_SM_ACTIVE": "sm_active",
    "DCGM_FI_PROF_SM_OCCUPANCY": "sm_occupancy",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "tensor_active",
    "DCGM_FI_PROF_DRAM_ACTIVE": "dram_active",
}


class Exporter:
    """Of one thread at a time. Where it does not answer, it is not asked again."""

    def __init__(self) -> None:
        self._url = os.environ.get(URL_VARIABLE, URL)

    def profile(self, uuid: str) -> dict[str, float]:
        """The newest figures of a device by UUID, from 0 to 1, by the names of `FIELDS`; those that it has."""
        if not self._url:
            return {}
        try:
            with urllib.request.urlopen(self._url, timeout=WAIT_S) as answer:  # noqa: S310 - the operator's own URL
                text = answer.read(LARGEST).decode()
            return _of(text, uuid)
        except (OSError, ValueError, http.client.HTTPException) as error:
            log.info("DCGM's exporter at %s says nothing: %s", self._url, error)
            self._url = ""
            return {}


def _of(text: str, uuid: str) -> dict[str, float]:
    """Raises ValueError where that is not what a Prometheus exporter serves."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # Of a device that is split there is one line for each part as well.
            if sample.name in FIELDS and sample.labels.get("UUID") == uuid and not sample.labels.get("GPU_I_ID"):
                found[FIELDS[sample.name]] = round(float(sample.value), 4)
    return found
