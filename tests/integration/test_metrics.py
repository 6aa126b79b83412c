"""Metrics of a running cluster: the fleet's page at a front door, and each process's own at Ray's metrics port."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from typing import Any

import pytest
from patience import eventually
from prometheus_client.parser import text_string_to_metric_families

from cluster.rpc import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(300)]

Samples = list[tuple[str, dict[str, str], float]]


def read(url: str) -> Samples:
    """Nothing, where no such page is."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as reply:
            text = reply.read().decode()
    except (OSError, urllib.error.URLError, UnicodeDecodeError):
        return []
    return [(s.name, s.labels, s.value) for family in text_string_to_metric_families(text) for s in family.samples]


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(value for n, found, value in samples if n == name and labels.items() <= found.items())


def test_what_a_request_did_reaches_prometheus(cluster: Any) -> None:
    before = total(read(cluster.http_url), "kvray_generation_tokens_total")
    sampling = pb.SamplingOptions(temperature=0, max_tokens=8, ignore_eos=True)
    cluster.stub().GenerateOnce(pb.GenerateRequest(text="Count for Prometheus", sampling=sampling), timeout=120)

    page: Samples = []

    def told() -> bool:
        """A heartbeat later than the answer."""
        page[:] = read(cluster.http_url)
        return total(page, "kvray_generation_tokens_total") >= before + 8

    eventually(told, "the fleet's page has the answer's tokens", 30)
    assert total(page, "kvray_replicas_ready") == 2
    assert len({labels["replica"] for name, labels, _ in page if name == "kvray_num_requests_running"}) == 2

    (ray_url,) = re.findall(r"(http://\S+)/metrics \(each process\)", cluster.log.read_text())

    samples: Samples = []

    def exported() -> bool:
        samples[:] = read(ray_url)
        tokens = total(samples, "ray_kvray_generation_tokens_total", deployment="LLMWorker")
        return tokens >= before + 8 and total(samples, "ray_kvray_request_success_total", finished_reason="length") >= 1

    eventually(exported, "Ray has passed on what the processes count", 60)
    blocks = {labels["replica"] for name, labels, _ in samples if name == "ray_kvray_kv_cache_blocks"}
    assert len(blocks) == 2
    assert total(samples, "ray_kvray_time_to_first_token_seconds_count", deployment="Ingress") >= 1
    assert total(samples, "ray_kvray_index_lookups_total", deployment="Ingress") >= 1
