"""What the service counts, in the Prometheus text format. One registry an app, so that two apps never share counts."""

import os

from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client import CollectorRegistry
from prometheus_client import Counter
from prometheus_client import Gauge
from prometheus_client import Histogram
from prometheus_client import generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Resolve answers from memory in well under a millisecond; a listing reads the database.
_BUCKETS_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """The service's metrics. Labels come from closed sets: a route's template, never a raw path."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._known: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._requests = Counter(
            "kdatune_http_requests_total", "requests answered", ("method", "route", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "kdatune_http_request_duration_seconds",
            "time from the request's head to the end of its answer",
            ("route",),
            buckets=_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.answers = Counter(
            "kdatune_resolve_answers_total",
            "resolved configs by how they were found",
            ("match",),
            registry=self.registry,
        )
        self.demand = Counter("kdatune_demand_reports_total", "misses that launchers reported", registry=self.registry)
        self.quarantined = Counter(
            "kdatune_quarantined_reports_total", "reports of a served config that failed", registry=self.registry
        )
        self.reloads = Counter(
            "kdatune_champion_reloads_total",
            "times the champions were read anew, all or what had changed",
            ("what",),
            registry=self.registry,
        )
        self.generation = Gauge(
            "kdatune_generation", "generation that is served", registry=self.registry, multiprocess_mode="livemin"
        )
        self.champions = Gauge(
            "kdatune_champions", "champions that are served", registry=self.registry, multiprocess_mode="livemin"
        )

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        key = (method if method in _METHODS else "OTHER", route, status)
        known = self._known.get(key)
        if known is None:  # looking a label up costs as much as counting: 5 us
            known = (self._requests.labels(key[0], route, str(status)), self._seconds.labels(route))
            self._known[key] = known
        known[0].inc()
        known[1].observe(seconds)

    def render(self) -> bytes:
        """The metrics as text: of all workers when PROMETHEUS_MULTIPROC_DIR is set, else of this process."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
