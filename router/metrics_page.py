"""metrics_page: the fleet as one front door hears of it, in Prometheus' text format.

Heartbeats carry the same numbers to every front door, so it does not matter which one answers. What front doors count
themselves differs between them and is exported per process instead (cluster.metric_export).

Owns: the families and their labels.
Does not: name what a replica counts (cluster.core.replica_metrics) or gather it (router.routing_state).
Invariants: one family per name; a replica that is gone is gone from the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE  # what generate_latest writes
from prometheus_client.registry import Collector

from cluster.core.metric_reading import MetricKind, MetricReading
from cluster.core.replica_metrics import replica_readings
from router.generation import ReplicaStatus
from router.readiness import READY, Readiness

__all__ = ["CONTENT_TYPE", "metrics_page"]

_LABELS = ("model_name", "replica")
_Family = GaugeMetricFamily | CounterMetricFamily


def metrics_page(replicas: Sequence[ReplicaStatus], readiness: Readiness) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(replicas, readiness))
    return generate_latest(registry)


class _Page(Collector):
    def __init__(self, replicas: Sequence[ReplicaStatus], readiness: Readiness) -> None:
        self._replicas = replicas
        self._readiness = readiness

    def collect(self) -> Iterable[_Family]:
        words = list(self._readiness.replicas.values())
        yield GaugeMetricFamily("kvray_ready", "1 if a request would be served now", float(self._readiness.ready))
        yield GaugeMetricFamily("kvray_replicas", "Replicas that Serve or the index knows", len(words))
        yield GaugeMetricFamily("kvray_replicas_ready", "Of them, those that serve", words.count(READY))
        families: dict[str, _Family] = {}
        for replica in self._replicas:
            labels = (replica.info.model, replica.info.worker_id)
            for reading in (*replica_readings(replica.load), _chunks(replica)):
                if reading.name not in families:
                    kind = GaugeMetricFamily if reading.kind is MetricKind.GAUGE else CounterMetricFamily
                    families[reading.name] = kind(reading.name, reading.help, labels=_LABELS)
                families[reading.name].add_metric(labels, reading.value)
        yield from families.values()


def _chunks(replica: ReplicaStatus) -> MetricReading:
    help = "Chunks that the index credits to the replica"
    return MetricReading("kvray_index_chunks", replica.indexed_chunks, MetricKind.GAUGE, help)
