"""replica_metrics: what one replica's load says, under the names that dashboards for vLLM know, with kvray's prefix.

Owns: names, kinds and help texts.
Does not: measure (worker.engine) or export (cluster.metric_export per process, router.metrics_page per cluster).
Invariants: always the same names in the same order, whatever the load.
"""

from __future__ import annotations

from cluster.core.metric_reading import MetricKind, MetricReading
from cluster.core.replica import ReplicaLoad

_G, _C = MetricKind.GAUGE, MetricKind.COUNTER


def replica_readings(load: ReplicaLoad) -> tuple[MetricReading, ...]:
    """Counters since the engine started."""
    blocks = load.total_blocks
    return (
        MetricReading("kvray_num_requests_running", load.running, _G, "Requests that the engine computes"),
        MetricReading("kvray_num_requests_waiting", load.waiting, _G, "Requests in the engine's queue"),
        MetricReading("kvray_num_requests_held", load.held, _G, "Of the waiting, those that wait for a shared prefix"),
        MetricReading(
            "kvray_kv_cache_usage_perc", load.in_use_blocks / blocks if blocks else 0.0, _G, "Blocks in use, 0 to 1"
        ),
        MetricReading(
            "kvray_kv_cache_cached_perc",
            load.cached_blocks / blocks if blocks else 0.0,
            _G,
            "Blocks kept for prefixes to come that no request uses now, 0 to 1",
        ),
        MetricReading("kvray_kv_cache_blocks", blocks, _G, "Blocks of the pool"),
        MetricReading(
            "kvray_uncached_tokens", load.total_uncached_tokens, _G, "Prompt tokens of live requests still to prefill"
        ),
        MetricReading("kvray_prefill_tokens_per_second", load.prefill_tokens_per_s, _G, "Recent rate of prefill"),
        MetricReading("kvray_step_time_seconds", load.step_time_s, _G, "Recent mean time of a step"),
        MetricReading("kvray_prefix_cache_queries", load.query_tokens, _C, "Prompt tokens looked up, once a request"),
        MetricReading("kvray_prefix_cache_hits", load.hit_tokens, _C, "Prompt tokens found, once a request"),
        MetricReading("kvray_generation_tokens", load.generated_tokens, _C, "Tokens generated"),
        MetricReading("kvray_num_requests_finished", load.finished_requests, _C, "Requests that ended"),
        MetricReading("kvray_num_requests_expired", load.expired_requests, _C, "Requests that their deadline ended"),
        MetricReading("kvray_num_requests_refused", load.refused_requests, _C, "Requests not let in"),
        MetricReading("kvray_num_preemptions", load.preemptions, _C, "Requests that gave their blocks back, to resume"),
        MetricReading("kvray_engine_busy_seconds", load.loaded_s, _C, "Time of steps with prefill or a queue"),
    )
