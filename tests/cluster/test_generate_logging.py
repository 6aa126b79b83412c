"""`kvray generate --log-blocks`: the block lines need a log, which the command otherwise does not set up."""

from __future__ import annotations

import pytest

from cluster.config import EngineConfig
from cluster.core.errors import ConfigError
from cluster.core.sampling import SamplingParams


@pytest.mark.torch
@pytest.mark.parametrize(("log_blocks", "roles"), [(True, ["generate"]), (False, [])])
def test_the_log_is_set_up_before_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch, log_blocks: bool, roles: list[str]
) -> None:
    from cluster import generate_command

    set_up: list[str] = []

    def no_model(model: str, console: object) -> None:
        raise ConfigError("as far as this test goes")

    monkeypatch.setattr(generate_command, "configure_logging", set_up.append)
    monkeypatch.setattr(generate_command, "resolve_with_progress", no_model)
    config = EngineConfig(log_blocks=log_blocks)
    with pytest.raises(ConfigError, match="as far as"):
        generate_command.run_generate(config, "Hi", SamplingParams(max_tokens=1), chat=False, as_json=False)
    assert set_up == roles
