"""A Prometheus as its HTTP interface shows it."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from typing import Any


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def targets(self) -> dict[str, tuple[str, str]]:
        """Instance to role and health, of all that it scrapes now."""
        active = self._get("targets")["activeTargets"]
        return {each["labels"]["instance"]: (each["labels"]["role"], each["health"]) for each in active}

    def rules(self) -> dict[str, dict[str, Any]]:
        """Alert to what is known of it."""
        return {rule["name"]: rule for group in self._get("rules")["groups"] for rule in group["rules"]}

    def values(self, query: str) -> list[float]:
        """What it answers now, without what is no number. Fails for a query that it does not understand."""
        found = self._get("query", query=query)["result"]
        return [value for each in found if not math.isnan(value := float(each["value"][1]))]

    def label_values(self, metric: str, label: str) -> list[str]:
        return [each["metric"][label] for each in self._get("query", query=metric)["result"]]

    def _get(self, what: str, **parameters: str) -> dict[str, Any]:
        url = f"{self._url}/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return dict(json.load(answer)["data"])
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters or what}: {error.read().decode()}") from error
