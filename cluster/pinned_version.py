"""pinned_version: a deployment's own version, so that a redeploy replaces only the replicas that the change concerns.

Serve replaces every replica whose deployment has another version than before; a change of the number of replicas or of
the autoscaler's bounds alone is applied to those that run. But it gives one version to all deployments of an
application, random in `serve.run` and a hash of all `args` in a config file, so that any change replaced everything.

    get_deploy_args (Ray 2.60)    writes Serve's version into each deployment's options, right before they are sent
    here                          the options keep the version that they have

The risk: the options' class is private to Serve. `pinned` tries whether it works, and else changes nothing, says so in
one line, and Serve replaces everything as it would without us.

Owns: this class, the trial, and a version from what a replica is told.
Does not: decide what a replica is told (cluster.replica_args).
Invariants: replicas that are told different things, or are of different releases of kvray, have different versions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from copy import deepcopy
from importlib.metadata import version as installed
from typing import Any

from ray.serve import Deployment

from cluster.core.hashing import digest_of

logger = logging.getLogger(__name__)


def version_of(told: Mapping[str, Any]) -> str:
    """Of a replica's arguments, which are plain values."""
    text = json.dumps({"kvray": installed("kvray"), "told": told}, sort_keys=True)
    return digest_of(text.encode())


def pinned(deployment: Deployment, version: str) -> Deployment:
    """The same deployment, whose version Serve will not replace by the application's."""
    try:
        deployment._deployment_config = _keeping(deployment._deployment_config, version)
    except Exception as error:
        logger.warning("every redeploy will replace all replicas: %s", error)
    return deployment


def _keeping(config: Any, version: str) -> Any:
    from ray.serve._private.config import DeploymentConfig

    class PinnedConfig(DeploymentConfig):  # type: ignore[misc]  # Ray is untyped
        def __setattr__(self, name: str, value: Any) -> None:
            if name != "version" or self.version is None:
                super().__setattr__(name, value)

    if type(config) is not DeploymentConfig:
        raise TypeError(f"Serve's options are of type {type(config).__name__}")
    kept = PinnedConfig.model_construct(**{name: getattr(config, name) for name in DeploymentConfig.model_fields})
    kept.version = version
    tried = deepcopy(kept)
    tried.version = "of the application"
    sent = DeploymentConfig.from_proto_bytes(tried.to_proto_bytes())
    if sent.version != version:
        raise RuntimeError("Serve's options do not keep their version")
    return kept
