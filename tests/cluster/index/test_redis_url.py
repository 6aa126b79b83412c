"""RedisTarget: every form of URL, and typed errors without a secret for everything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.errors import ConfigError
from cluster.index.redis_client import connect
from cluster.index.redis_url import RedisMode, RedisTarget, hide_secrets, parse_redis_url


def test_one_server() -> None:
    assert parse_redis_url("redis://h") == RedisTarget(mode=RedisMode.SINGLE, hosts=(("h", 6379),))
    target = parse_redis_url("rediss://me:p%40ss%2F@[::1]:7000/3?ssl_cert_reqs=none&ssl_check_hostname=false")
    assert (target.hosts, target.db, target.username, target.password) == ((("::1", 7000),), 3, "me", "p@ss/")
    assert target.tls == {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
    assert parse_redis_url("redis://:only@h").username is None
    assert parse_redis_url("redis://h?db=2").db == 2


def test_unix_socket() -> None:
    target = parse_redis_url("unix://:pw@/run/redis.sock?db=2")
    assert (target.unix_path, target.db, target.password, target.hosts) == ("/run/redis.sock", 2, "pw", ())


def test_sentinels() -> None:
    target = parse_redis_url("redis+sentinel://u:p@a,b:26380/main/1?sentinel_password=q")
    assert target.mode is RedisMode.SENTINEL
    assert target.hosts == (("a", 26379), ("b", 26380))
    assert (target.service, target.db, target.password, target.sentinel_password) == ("main", 1, "p", "q")
    assert parse_redis_url("rediss+sentinel://a/main").tls == {}


def test_cluster() -> None:
    target = parse_redis_url("rediss+cluster://a:1,b:2/")
    assert (target.mode, target.hosts, target.tls) == (RedisMode.CLUSTER, (("a", 1), ("b", 2)), {})


SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        "",
        SECRET,
        f"http://:{SECRET}@h",
        "redis://",
        f"redis://:{SECRET}@",
        f"redis://:{SECRET}@h:0",
        f"redis://:{SECRET}@h:99999",
        f"redis://:{SECRET}@h:port",
        f"redis://:{SECRET}/x@h",
        f"redis://u:{SECRET}#x@h",
        f"redis://u:{SECRET}?x@h",
        f"redis://:[{SECRET}@h",
        f"redis://:{SECRET}@a,b",
        f"redis://:{SECRET}@h/0/1",
        f"redis://:{SECRET}@h/{SECRET}",
        f"redis://h?password={SECRET}",
        f"redis://h?{SECRET}=1",
        f"redis://:{SECRET}@h?ssl_cert_reqs=none",
        f"rediss://:{SECRET}@h?ssl_cert_reqs={SECRET}",
        f"rediss://:{SECRET}@h?ssl_check_hostname={SECRET}",
        f"rediss://:{SECRET}@h?ssl_ca_certs=/nonexistent.pem",
        f"redis+sentinel://:{SECRET}@h",
        f"redis+sentinel://:{SECRET}@h/a/b/c",
        f"redis+sentinel://:{SECRET}@h/a/x",
        f"redis+cluster://:{SECRET}@h/1",
        f"unix://:{SECRET}@host/path",
        f"unix://:{SECRET}@",
        f"redis://:{SECRET} @h",
        f"redis://:{SECRET}\n@h",
    ],
)
def test_a_bad_url_is_a_config_error_without_its_secrets(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        connect(url, 1.0)
    chain: BaseException | None = raised.value
    while chain is not None:
        assert SECRET not in str(chain)
        chain = chain.__cause__


@given(
    rest=st.text(max_size=40), scheme=st.sampled_from(["redis", "rediss", "unix", "redis+sentinel", "redis+cluster"])
)
def test_any_text_is_a_target_or_a_config_error(rest: str, scheme: str) -> None:
    try:
        target = parse_redis_url(f"{scheme}://{rest}")
    except ConfigError:
        return
    assert target.hosts or target.unix_path


def test_no_printed_form_holds_a_password() -> None:
    url = f"redis+sentinel://u:{SECRET}@a,b/s?sentinel_password={SECRET}"
    assert SECRET not in repr(parse_redis_url(url))
    assert hide_secrets(url) == "redis+sentinel://***@a,b/s?sentinel_password=***"
    assert hide_secrets(f"redis://u:a/{SECRET}@b@h:1/0") == "redis://***@h:1/0"
    assert hide_secrets("redis://h:1/0") == "redis://h:1/0"
