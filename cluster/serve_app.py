"""build: the application builder that a Serve config file names as `import_path: cluster.serve_app:build`.

Owns: turning the file's `args` into ClusterConfig, and where Redis's address comes from.
Does not: define deployments (cluster.app) or check the rest of the file (cluster.serve_file).
Invariants: wrong args end in one line that names each wrong key; without an address of Redis nothing is built.
"""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from cluster.app import build_app
from cluster.core.errors import ConfigError
from cluster.ray_environment import REDIS_URL_VARIABLE, redis_url_from_environment
from cluster.serve_file import validate_args


def build(args: dict[str, Any]) -> Application:
    """`args` is a ClusterConfig tree; keys that are left out have its defaults."""
    config = validate_args(args)
    url = config.index.redis_url or redis_url_from_environment()
    if url is None:
        raise ConfigError(
            f"no Redis: set {REDIS_URL_VARIABLE} in the environment of every Ray process, or args/index/redis_url"
        )
    index = config.index.model_copy(update={"redis_url": url})
    return build_app(config.model_copy(update={"index": index}))
