"""replica_args: what each kind of replica is told of the configuration, and no more.

Serve replaces the replicas that would be told something else (cluster.pinned_version), which takes workers minutes. So
a change of what only others need, or of how many there are, must not show in what they are told.

Owns: for workers and front doors, the options that they read; all others are at their defaults.
Does not: define deployments (cluster.app) or know Serve.
Invariants: both speak of the same model, index and scheme; the number of replicas of either kind is in neither.
"""

from __future__ import annotations

from cluster.config import AutoscalingConfig, CacheConfig, ClusterConfig, EngineConfig, ServeConfig


def told_to_workers(config: ClusterConfig) -> ClusterConfig:
    """The engine, the index, how long to drain, and what to measure for the autoscaler."""
    scaling = config.autoscaling
    if scaling is not None:
        measured = scaling.model_dump(include={"ttft_target_s", "coldest_victim"})
        scaling = AutoscalingConfig(max_replicas=1, **measured)
    return ClusterConfig(
        engine=config.engine,
        index=config.index,
        serve=ServeConfig(replicas=1, drain_s=config.serve.drain_s),
        autoscaling=scaling,
        served_model_name=config.served_model_name,
    )


def told_to_front_doors(config: ClusterConfig) -> ClusterConfig:
    """The model's name, tokens and chunks, the index, the router's own part, and whether there may be no worker."""
    engine, scaling = config.engine, config.autoscaling
    to_zero = scaling is not None and scaling.min_replicas == 0
    return ClusterConfig(
        engine=EngineConfig(
            model=engine.model,
            token_budget=engine.token_budget,
            max_num_seqs=engine.max_num_seqs,
            ageing_s=engine.ageing_s,
            cache=CacheConfig(block_size=1, chunk_tokens=engine.cache.chunk_tokens),
        ),
        index=config.index,
        router=config.router.model_copy(update={"replicas": 1}),
        serve=ServeConfig(replicas=1),
        autoscaling=AutoscalingConfig(min_replicas=0, max_replicas=1) if to_zero else None,
        served_model_name=config.served_model_name,
    )
