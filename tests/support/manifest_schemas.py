"""What is wrong with a manifest by its kind's schema, unknown keys included.

Core kinds: the schemas of kubernetes-validate. KubeRay's: the CRDs in $KVRAY_CRDS, or in ../shared/crds beside this
project, which are not part of it. PodMonitor: its CRD when it lies there too, else the few keys that we use.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from manifests import ROOT, Document, Manifests

KUBERNETES = "1.34"
_ENDPOINT = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"port": {"type": "string"}, "interval": {"type": "string"}},
    "required": ["port"],
}
_POD_MONITOR = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "podMetricsEndpoints"],
            "properties": {
                "selector": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["matchLabels"],
                    "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}},
                },
                "podTargetLabels": {"type": "array", "items": {"type": "string"}},
                "podMetricsEndpoints": {"type": "array", "minItems": 1, "items": _ENDPOINT},
            },
        }
    },
}


def crd_folder() -> Path:
    return Path(os.environ.get("KVRAY_CRDS") or ROOT.parent / "shared" / "crds")


@cache
def crd_schemas() -> dict[tuple[str, str], dict[str, Any]]:
    """By apiVersion and kind. Empty where the folder is absent."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(crd_folder().glob("*.yaml")):
        crd = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for version in crd["spec"]["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            # The API server checks these itself; a CRD only says `type: object` of them.
            schema["properties"]["metadata"] = {"x-kubernetes-preserve-unknown-fields": True}
            found[f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"]] = closed(schema)
    return found


def closed(schema: Any) -> Any:
    """The structural schema as JSON Schema, in which an object without other rules takes only the keys it names."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result: dict[str, Any] = {}
    for key, value in schema.items():
        named = key == "properties"  # there, keys are names and not keywords
        result[key] = {name: closed(inner) for name, inner in value.items()} if named else closed(value)
    open_ended = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in schema and not open_ended:
        result["additionalProperties"] = False
    if schema.get("nullable") and "type" in schema:
        result["type"] = [schema["type"], "null"]
    return result


def problems(manifests: Manifests) -> list[str]:
    return [problem for document in manifests.documents for problem in problems_of(document)]


def problems_of(document: Document) -> Iterator[str]:
    """AssertionError for a RayService where there are no CRDs to check it with."""
    place = f"{document['kind']} {document['metadata']['name']}"
    schema = crd_schemas().get((document["apiVersion"], document["kind"]))
    if schema is None and document["kind"] == "PodMonitor":
        schema = _POD_MONITOR
    if schema is None:
        assert not document["apiVersion"].startswith("ray.io/"), "KubeRay's CRDs are missing"
        yield from _core_problems(document, place)
        return
    for error in jsonschema.Draft202012Validator(schema).iter_errors(document):
        yield f"{place}: {'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
    if document["kind"] == "RayService":
        yield from _template_problems(document, place)


def _core_problems(document: Document, place: str) -> Iterator[str]:
    problem = _core_problem(json.dumps(document))
    if problem is not None:
        yield f"{place}: {problem}"


@cache
def _core_problem(document: str) -> str | None:
    """By the text, because the validator reads megabytes of schemas each time."""
    try:
        kubernetes_validate.validate(json.loads(document), KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
    return None


def _template_problems(document: Document, place: str) -> Iterator[str]:
    """CRDs describe pod templates as of their day; the core schema is stricter, on probes and ports for example."""
    cluster = document["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": group["template"]["spec"]}
        yield from _core_problems(pod, f"{place}, {group.get('groupName', 'head')}")
