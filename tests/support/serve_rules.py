"""What is wrong with a Serve config: by Ray's own schema, and what that lets pass, unknown keys and min > max."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from cluster.app import GRPC_SERVICERS
from cluster.config import ClusterConfig

IMPORT_PATH = "cluster.serve_app:build"
DEPLOYMENTS = ("Ingress", "LLMWorker")


def problems(config: dict[str, Any]) -> list[str]:
    found = list(unknown_keys(ServeDeploySchema, config))
    try:
        schema = ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        return found + lines(error, "serveConfigV2")
    given = schema.grpc_options.grpc_servicer_functions
    found += [f"grpc_options: {name} is missing" for name in GRPC_SERVICERS if name not in given]
    for application, raw in zip(schema.applications, config["applications"], strict=True):
        if application.import_path != IMPORT_PATH:
            found.append(f"{application.name}: the import_path is not {IMPORT_PATH}")
        for deployment in application.deployments:
            if deployment.name not in DEPLOYMENTS:
                found.append(f"{application.name}: no deployment is called {deployment.name!r}")
            if isinstance(given := deployment.autoscaling_config, dict):
                found += list(_bounds(given, f"{application.name}/{deployment.name}"))
        try:
            ClusterConfig.model_validate(raw.get("args", {}))
        except ValidationError as error:
            found += lines(error, f"{application.name}/args")
    return found


def unknown_keys(model: type[BaseModel], data: dict[str, Any], place: str = "") -> Iterator[str]:
    """Keys that `model`, or a model inside it, would silently drop."""
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    fields |= model.model_fields
    for key, value in data.items():
        at = f"{place}/{key}" if place else key
        if key not in fields:
            yield f"{at}: unknown key"
            continue
        inner = next(_models(fields[key].annotation), None)
        for item in value if isinstance(value, list) else [value]:
            if inner is not None and isinstance(item, dict):
                yield from unknown_keys(inner, item, at)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)


def _bounds(given: dict[str, Any], place: str) -> Iterator[str]:
    yield from unknown_keys(AutoscalingConfig, given, f"{place}/autoscaling_config")
    try:
        AutoscalingConfig(**given)
    except ValidationError as error:
        yield from lines(error, f"{place}/autoscaling_config")


def lines(error: ValidationError, place: str) -> list[str]:
    return [f"{place}/{'/'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
