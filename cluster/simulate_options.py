"""FleetOptions: what `kvray simulate` was told, for a fleet.

Owns: checking the options against each other, and the settings of the simulation that they mean.
Does not: read traces or run (cluster.simulate_fleet_command).
Invariants: a wrong option is a ConfigError that names it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from cluster.core.errors import ConfigError
from cluster.simulate.fleet_simulation import Death, FleetSettings
from cluster.simulate.scaled_replica import ReplicaSettings
from cluster.simulate.step_times import EXAMPLE, EXAMPLE_KV_TOKENS, read_step_time


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """trace, log: one of them; a log needs a tokenizer.  policy None: all, or with a log three.

    speed, rate (requests per second), load (utilisation under least_uncached): one of them, or none (speed 1).
    chunk_tokens, output_tokens: of a log.
    """

    trace: Path | None
    log: Path | None = None
    tokenizer: Path | None = None
    chunk_tokens: int = 64
    output_tokens: int = 256
    ttft_target: float | None = None
    replicas: int
    policy: str | None
    speed: float | None
    rate: float | None
    load: float | None
    limit: int | None
    cold_share: float | None
    kv_tokens: int | None
    event_lag_ms: float
    kill: str | None
    step_time: Path | None
    token_budget: int
    max_num_seqs: int
    prefix_first: bool
    ageing_s: float
    hold_back: bool
    seed: int
    png: Path | None

    @property
    def source(self) -> Path:
        """The trace or the log."""
        source = self.trace or self.log
        assert source is not None
        return source

    def check(self) -> None:
        """ConfigError names the option."""
        self._check_source()
        self._check_speed()
        if self.ttft_target is not None and not 0 < self.ttft_target < math.inf:
            raise ConfigError("--ttft-target must be a number above 0")
        if self.ttft_target is not None and self.kill is not None:
            raise ConfigError("--ttft-target looks for the size of a fleet that lives; leave out --kill")

    def _check_source(self) -> None:
        if (self.trace is None) == (self.log is None):
            raise ConfigError("give --trace or --log, and not both")
        if (self.log is None) != (self.tokenizer is None):
            raise ConfigError("--log needs --tokenizer, the directory of a model's tokenizer, and a trace needs none")
        if not 1 <= self.chunk_tokens <= 65536:
            raise ConfigError("--chunk-tokens must be from 1 to 65536")
        if self.output_tokens < 1:
            raise ConfigError("--output-tokens must be at least 1")
        if self.cold_share is not None and not 0 < self.cold_share <= 1:
            raise ConfigError("--cold-share must be above 0 and at most 1")
        if self.limit is not None and self.limit < 1:
            raise ConfigError("--limit must be at least 1")

    def _check_speed(self) -> None:
        given = {"speed": self.speed, "rate": self.rate, "load": self.load}
        if sum(value is not None for value in given.values()) > 1:
            raise ConfigError("--speed, --rate and --load all say how fast requests arrive; give one")
        for name, value in given.items():
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name} must be a number above 0")
        if self.load is not None and self.load >= 1:
            raise ConfigError("--load is a share of the replicas' time, below 1")

    def settings(self, block: int) -> FleetSettings:
        """`block`: tokens that a hash id of the requests stands for. ConfigError names the option."""
        kv_tokens = EXAMPLE_KV_TOKENS if self.kv_tokens is None else self.kv_tokens
        if kv_tokens < block:
            raise ConfigError(f"--kv-tokens must be at least {block}")
        settings = FleetSettings(
            replicas=self.replicas,
            replica=ReplicaSettings(
                kv_tokens=kv_tokens,
                step_time=EXAMPLE if self.step_time is None else read_step_time(self.step_time),
                token_budget=self.token_budget,
                max_num_seqs=self.max_num_seqs,
                prefix_first=self.prefix_first,
                ageing_s=self.ageing_s,
                hold_back=self.hold_back,
                block=block,
            ),
            event_lag_s=self.event_lag_ms / 1000,
            death=None if self.kill is None else parse_kill(self.kill),
            seed=self.seed,
        )
        settings.check()
        return settings


def parse_kill(text: str) -> Death:
    found = re.fullmatch(r"(\d+)@(\d+(?:\.\d+)?)", text)
    if found is None:
        raise ConfigError(f"--kill {text!r} is not REPLICA@SECONDS, such as 3@120")
    return Death(replica=int(found[1]), at_s=float(found[2]))
