"""Metrics of one process. The one place that knows prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from headrace.telemetry.phases import Lane

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Named metrics, made at first use, all under `headrace_` and labelled with run and service."""

    def __init__(self, run_id: str, service: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"run": run_id, "service": service}
        self._known: dict[str, Counter | Gauge | Histogram] = {}

    def count(self, name: str, amount: float = 1.0, *, help: str = "", **labels: str) -> None:
        """Add to a counter; Prometheus shows it as `headrace_<name>_total`."""
        metric = self._known.get(name)
        if metric is None:
            metric = Counter(f"headrace_{name}", help or name, self._names(labels), registry=self._registry)
            self._known[name] = metric
        assert isinstance(metric, Counter)
        metric.labels(**self._labels, **labels).inc(amount)

    def gauge(self, name: str, value: float, *, help: str = "", **labels: str) -> None:
        """Set a gauge."""
        metric = self._known.get(name)
        if metric is None:
            metric = Gauge(f"headrace_{name}", help or name, self._names(labels), registry=self._registry)
            self._known[name] = metric
        assert isinstance(metric, Gauge)
        metric.labels(**self._labels, **labels).set(value)

    def observe(self, name: str, value: float, *, buckets: Iterable[float], help: str = "", **labels: str) -> None:
        """Add one observation to a histogram with these upper bounds."""
        metric = self._known.get(name)
        if metric is None:
            names = self._names(labels)
            metric = Histogram(f"headrace_{name}", help or name, names, buckets=tuple(buckets), registry=self._registry)
            self._known[name] = metric
        assert isinstance(metric, Histogram)
        metric.labels(**self._labels, **labels).observe(value)

    def watch(self, *lanes: Lane) -> None:
        """Expose the phases of these lanes as `headrace_phase_seconds_total{lane, phase}`, and what was computed in
        them as `headrace_phase_flop_total` and `headrace_phase_bytes_total`.
        """
        self._registry.register(_Phases(lanes, self._labels))

    def render(self) -> bytes:
        """The text of `/metrics`."""
        return generate_latest(self._registry)

    def _names(self, labels: dict[str, str]) -> list[str]:
        return [*self._labels, *labels]


class _Phases(Collector):
    def __init__(self, lanes: tuple[Lane, ...], labels: dict[str, str]) -> None:
        self._lanes = lanes
        self._labels = labels

    def collect(self) -> Iterator[CounterMetricFamily]:
        labels = [*self._labels, "lane", "phase"]
        seconds = CounterMetricFamily("headrace_phase_seconds", "Seconds per lane and phase", labels=labels)
        flop = CounterMetricFamily("headrace_phase_flop", "Operations, by the model's arithmetic", labels=labels)
        nbytes = CounterMetricFamily("headrace_phase_bytes", "Bytes moved, by the model's arithmetic", labels=labels)
        for lane in self._lanes:
            for phase, spent in lane.seconds().items():
                seconds.add_metric([*self._labels.values(), lane.name, phase], spent)
            for phase, work in lane.done().items():
                flop.add_metric([*self._labels.values(), lane.name, phase], work.flop)
                nbytes.add_metric([*self._labels.values(), lane.name, phase], work.nbytes)
        yield from (seconds, flop, nbytes)
