"""ServeFile: a Serve config file of ours, read strictly. `kvray serve --config`, `serve deploy` and KubeRay take it.

Serve's own schema drops keys it does not know and leaves some parts unread, so that a typing error becomes a default.
Here every key must be one that Serve or ClusterConfig knows, and the parts must agree with each other.

Owns: what is wrong with such a file, all of it in one message, and the models that it serves.
Does not: read the environment, deploy (cluster.launcher) or build applications (cluster.serve_app).
Invariants: a ServeFile's document passes ServeDeploySchema; no two of its models share a name, a route or index keys.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from cluster.config import ClusterConfig
from cluster.core.errors import ConfigError

IMPORT_PATH = "cluster.serve_app:build"
DEPLOYMENTS = ("Ingress", "LLMWorker")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One application of the file. `config.serve` has the file's name, host and ports."""

    name: str
    route_prefix: str
    config: ClusterConfig


@dataclass(frozen=True, slots=True)
class ServeFile:
    """`document` is what Serve is given; `models` are those of its applications that are ours."""

    document: dict[str, Any]
    models: tuple[ServedModel, ...]

    def with_configs(self, configs: typing.Sequence[ClusterConfig]) -> ServeFile:
        """The same applications, differently configured. Redis's address stays out: it would stand in Serve's log."""
        args = {
            model.name: config.model_dump(mode="json", exclude_unset=True, exclude={"index": {"redis_url"}})
            for model, config in zip(self.models, configs, strict=True)
        }
        applications = [
            {**app, "args": args.get(app.get("name", "default"), app.get("args") or {})}
            for app in self.document["applications"]
        ]
        models = tuple(
            ServedModel(model.name, model.route_prefix, config)
            for model, config in zip(self.models, configs, strict=True)
        )
        return ServeFile({**self.document, "applications": applications}, models)


def read_serve_file(
    path: Path, *, host: str | None = None, port: int | None = None, grpc_port: int | None = None
) -> ServeFile:
    """The other arguments replace what the file says. ConfigError names all that is wrong."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if isinstance(document, dict):
        http = {"host": host, "port": port}
        for part, given in (("http_options", http), ("grpc_options", {"port": grpc_port})):
            changes = {key: value for key, value in given.items() if value is not None}
            said = document.get(part) or {}
            if changes and isinstance(said, dict):
                document[part] = {**said, **changes}
    return parse_serve_document(document, str(path))


def parse_serve_document(document: Any, source: str = "the Serve config") -> ServeFile:
    """ConfigError names all that is wrong."""
    problems, models = check_serve_document(document)
    if problems:
        raise ConfigError(f"{source}: {'; '.join(problems)}")
    return ServeFile(document, models)


def check_serve_document(document: Any) -> tuple[list[str], tuple[ServedModel, ...]]:
    """All that is wrong, one line each, and the models that are right."""
    from ray.serve.schema import ServeDeploySchema

    if not isinstance(document, dict):
        return ["it is not a mapping with `applications`"], ()
    problems = list(unknown_keys(ServeDeploySchema, document))
    try:
        schema = ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        return problems + _lines(error), ()
    models = []
    for place, application in enumerate(schema.applications):
        raw = document["applications"][place]
        at = f"applications/{application.name}"
        problems += _bounds(application, at)
        if application.import_path != IMPORT_PATH:
            continue
        problems += _strange_deployments(application, at)
        if application.route_prefix is None:
            problems.append(f"{at}/route_prefix: without one neither HTTP nor gRPC reaches the application")
            continue
        try:
            config = validate_args(raw.get("args") or {}, f"{at}/args")
        except ConfigError as error:
            problems.append(error.message)
            continue
        serve = {
            "name": application.name,
            "host": schema.http_options.host,
            "port": schema.http_options.port,
            "grpc_port": schema.grpc_options.port,
        }
        problems += _disagreements(config, serve, f"{at}/args/serve")
        config = config.model_copy(update={"serve": config.serve.model_copy(update=serve)})
        models.append(ServedModel(application.name, application.route_prefix, config))
    if not models and not problems:
        problems.append(f"applications: none has the import_path {IMPORT_PATH}")
    problems += _missing_servicers(schema.grpc_options.grpc_servicer_functions) + _shared_keys(models)
    return problems, tuple(models)


def validate_args(args: Mapping[str, Any], at: str = "args") -> ClusterConfig:
    """An application's `args`. ConfigError has one line for all that is wrong."""
    try:
        return ClusterConfig.model_validate(args)
    except ValidationError as error:
        raise ConfigError("; ".join(_lines(error, at))) from None


def unknown_keys(model: type[BaseModel], data: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Keys in `data` that `model` or a model inside it would silently drop."""
    known = {name: field.annotation for name, field in model.model_fields.items()}
    known |= {field.alias: field.annotation for field in model.model_fields.values() if field.alias}
    for key, value in data.items():
        place = f"{at}/{key}" if at else str(key)
        if key not in known:
            yield f"{place}: unknown key"
            continue
        inner = next(_models_in(known[key]), None)
        if inner is None:
            continue
        for number, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, Mapping):
                named = item.get("name", number) if isinstance(value, list) else None
                yield from unknown_keys(inner, item, place if named is None else f"{place}/{named}")


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models_in(part)


def _bounds(application: Any, at: str) -> list[str]:
    """Serve keeps `autoscaling_config` as a plain mapping until it deploys."""
    from ray.serve.config import AutoscalingConfig

    problems = []
    for deployment in application.deployments:
        if isinstance(given := deployment.autoscaling_config, dict):
            defaults = AutoscalingConfig.default().model_dump(exclude_unset=True)
            base = defaults if deployment.num_replicas == "auto" else {}
            try:
                AutoscalingConfig(**{**base, **{key: value for key, value in given.items() if key != "policy"}})
            except ValidationError as error:
                problems += _lines(error, f"{at}/deployments/{deployment.name}/autoscaling_config")
    return problems


def _strange_deployments(application: Any, at: str) -> list[str]:
    names = [deployment.name for deployment in application.deployments]
    return [
        f"{at}/deployments: there is no {name!r}, only {' and '.join(DEPLOYMENTS)}"
        for name in names
        if name not in DEPLOYMENTS
    ]


def _disagreements(config: ClusterConfig, decided: Mapping[str, Any], at: str) -> list[str]:
    return [
        f"{at}/{key}: {getattr(config.serve, key)!r}, but the file's own {key} is {value!r}: leave it out here"
        for key, value in decided.items()
        if key in config.serve.model_fields_set and getattr(config.serve, key) != value
    ]


def _missing_servicers(given: list[str]) -> list[str]:
    from cluster.app import GRPC_SERVICERS

    missing = [name for name in GRPC_SERVICERS if name not in given]
    return [f"grpc_options/grpc_servicer_functions: {name} is missing" for name in missing]


def _shared_keys(models: list[ServedModel]) -> list[str]:
    """Two models under one index key would route by each other's caches."""
    owners: dict[tuple[str, str], str] = {}
    problems = []
    for model in models:
        key = (model.config.index.key_prefix, model.config.public_name)
        owner = owners.setdefault(key, model.name)
        if owner != model.name:
            problems.append(
                f"applications/{model.name}: it has the model name {key[1]!r} and the index.key_prefix {key[0]!r} of "
                f"{owner!r}; change served_model_name or index.key_prefix"
            )
    return problems


def _lines(error: ValidationError, at: str = "") -> list[str]:
    lines = []
    for problem in error.errors():
        place = "/".join(filter(None, [at, *map(str, problem["loc"])]))
        unknown = problem["type"] == "extra_forbidden"
        message = "unknown key" if unknown else problem["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {message}" if place else message)
    return lines
