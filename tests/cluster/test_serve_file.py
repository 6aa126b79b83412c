"""Serve config files: what is refused, and with which words; and that the one in the tree names every option."""

from __future__ import annotations

import copy
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from cluster.app import GRPC_SERVICERS
from cluster.config import ClusterConfig
from cluster.core.errors import ConfigError
from cluster.serve_app import build
from cluster.serve_file import check_serve_document, parse_serve_document, read_serve_file

FILE = Path(__file__).parents[2] / "cluster" / "serve_config.yaml"


def document(**changes: Any) -> dict[str, Any]:
    """A small file with one application; `changes` are its args."""
    return {
        "http_options": {"host": "127.0.0.1", "port": 8100},
        "grpc_options": {"port": 9100, "grpc_servicer_functions": list(GRPC_SERVICERS)},
        "applications": [
            {"name": "one", "route_prefix": "/", "import_path": "cluster.serve_app:build", "args": changes},
        ],
    }


def two_models() -> dict[str, Any]:
    both = document(engine={"model": "a/one"})
    second = {"name": "two", "route_prefix": "/two", "args": {"engine": {"model": "a/two"}}}
    both["applications"].append({**both["applications"][0], **second})
    return both


def options_of(model: type[BaseModel], at: str = "") -> set[str]:
    names = set()
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            names |= options_of(inner, f"{at}{name}.")
        elif not optional_part(inner):
            names.add(f"{at}{name}")
    return names


def optional_part(annotation: Any) -> type[BaseModel] | None:
    """A part of the configuration that may be left out altogether."""
    parts = [part for part in typing.get_args(annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
    return parts[0] if parts else None


def without_comment_marks(text: str) -> str:
    """The examples in the comments become part of the document."""
    return re.sub(r"(?m)^( +)# ( *(?:autoscaling:$|  [a-z_]+: \S+  #|  [a-z_]+: \S+$))", r"\1\2", text)


def flat(tree: dict[str, Any], at: str = "") -> set[str]:
    names = set()
    for name, value in tree.items():
        names |= flat(value, f"{at}{name}.") if isinstance(value, dict) else {f"{at}{name}"}
    return names


def test_the_file_in_the_tree_names_every_option_at_its_default() -> None:
    raw = yaml.safe_load(FILE.read_text())
    (application,) = raw["applications"]
    elsewhere = {"serve.name", "serve.host", "serve.port", "serve.grpc_port"}
    assert flat(application["args"]) == options_of(ClusterConfig) - elsewhere
    (model,) = read_serve_file(FILE).models
    assert model.config == ClusterConfig()
    assert (model.name, model.route_prefix) == ("kvray", "/")
    assert {d["name"] for d in application["deployments"]} == {"Ingress", "LLMWorker"}
    assert raw["grpc_options"]["grpc_servicer_functions"] == list(GRPC_SERVICERS)


def test_parts_that_may_be_left_out_are_in_a_comment_with_their_defaults() -> None:
    (application,) = yaml.safe_load(without_comment_marks(FILE.read_text()))["applications"]
    optional = {name: optional_part(field.annotation) for name, field in ClusterConfig.model_fields.items()}
    for name, part in optional.items():
        if part is not None:
            shown = application["args"][name]
            assert set(shown) == set(part.model_fields)
            required = {key: shown[key] for key, field in part.model_fields.items() if field.is_required()}
            assert part.model_validate(shown) == part.model_validate(required)


def test_places_given_beside_the_file_replace_what_it_says() -> None:
    file = read_serve_file(FILE, host="127.0.0.2", port=1, grpc_port=2)
    serve = file.models[0].config.serve
    assert (serve.host, serve.port, serve.grpc_port) == ("127.0.0.2", 1, 2)
    assert file.document["http_options"]["port"] == 1 and file.document["grpc_options"]["port"] == 2
    assert file.document["grpc_options"]["grpc_servicer_functions"] == list(GRPC_SERVICERS)


WRONG: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("http_option",), {"port": 1}, "http_option: unknown key"),
    (("http_options", "prot"), 1, "http_options/prot: unknown key"),
    (("grpc_options", "servicers"), [], "grpc_options/servicers: unknown key"),
    (("grpc_options", "grpc_servicer_functions"), list(GRPC_SERVICERS[:2]), f"{GRPC_SERVICERS[2]} is missing"),
    (("http_options", "port"), "many", "http_options/port: Input should be a valid integer"),
    (("proxy_location",), "Nowhere", "proxy_location: "),
    (("applications", 0, "route"), "/x", "applications/one/route: unknown key"),
    (("applications", 0, "route_prefix"), None, "applications/one/route_prefix: without one"),
    (("applications", 0, "import_path"), "other:build", "none has the import_path cluster.serve_app:build"),
    (("applications", 0, "args"), {"engin": {}}, "applications/one/args/engin: unknown key"),
    (("applications", 0, "args"), {"engine": {"modle": "x"}}, "applications/one/args/engine/modle: unknown key"),
    (("applications", 0, "args"), {"serve": {"replicas": 0}}, "applications/one/args/serve/replicas: Input should be"),
    (("applications", 0, "args"), {"serve": {"port": 1}}, "applications/one/args/serve/port: 1, but the file's own"),
    (("applications", 0, "args"), {"serve": {"name": "x"}}, "applications/one/args/serve/name: 'x', but the file's"),
    (
        ("applications", 0, "args"),
        {"engine": {"cache": {"block_size": 16, "chunk_tokens": 65}}},
        "applications/one/args/engine/cache/chunk_tokens: chunk_tokens (65) must be a multiple",
    ),
    (("applications", 0, "deployments"), [{"name": "Worker"}], "applications/one/deployments: there is no 'Worker'"),
    (
        ("applications", 0, "deployments"),
        [{"name": "LLMWorker", "max_replica_per_node": 1}],
        "applications/one/deployments/LLMWorker/max_replica_per_node: unknown key",
    ),
    (
        ("applications", 0, "deployments"),
        [{"name": "LLMWorker", "ray_actor_options": {"num_gpu": 1}}],
        "applications/one/deployments/LLMWorker/ray_actor_options/num_gpu: unknown key",
    ),
    (
        ("applications", 0, "deployments"),
        [{"name": "LLMWorker", "autoscaling_config": {"min_replica": 1}}],
        "applications/one/deployments/LLMWorker/autoscaling_config/min_replica: unknown key",
    ),
    (
        ("applications", 0, "deployments"),
        [{"name": "LLMWorker", "autoscaling_config": {"min_replicas": 4, "max_replicas": 2}}],
        "applications/one/deployments/LLMWorker/autoscaling_config: max_replicas (2) must be greater",
    ),
]


@pytest.mark.parametrize(("path", "value", "says"), WRONG, ids=[says for _, _, says in WRONG])
def test_what_is_wrong_is_named_with_its_place(path: tuple[str | int, ...], value: Any, says: str) -> None:
    wrong = document()
    place: Any = wrong
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    problems, _ = check_serve_document(wrong)
    assert any(says in problem for problem in problems), problems
    with pytest.raises(ConfigError) as raised:
        parse_serve_document(wrong, "my.yaml")
    assert raised.value.message.startswith("my.yaml: ") and "\n" not in raised.value.message


def test_a_right_file_has_no_problem() -> None:
    auto = {"name": "LLMWorker", "num_replicas": "auto", "autoscaling_config": {"min_replicas": 4}}
    right = document(engine={"model": "a/b"})
    right["applications"][0]["deployments"] = [auto, {"name": "Ingress", "ray_actor_options": {"num_cpus": 1}}]
    assert check_serve_document(right)[0] == []


def test_several_mistakes_are_all_named() -> None:
    wrong = document(engine={"modle": "x", "dtype": "int3"})
    wrong["http_options"]["prot"] = 1
    problems, models = check_serve_document(wrong)
    assert len([part for problem in problems for part in problem.split("; ")]) == 3 and models == ()


def test_two_models_have_their_own_names_routes_and_index_keys() -> None:
    one, two = parse_serve_document(two_models()).models
    assert (one.name, one.route_prefix, one.config.public_name) == ("one", "/", "a/one")
    assert (two.name, two.route_prefix, two.config.public_name) == ("two", "/two", "a/two")
    assert (one.config.serve.name, two.config.serve.name) == ("one", "two")
    assert (one.config.serve.port, one.config.serve.grpc_port) == (two.config.serve.port, two.config.serve.grpc_port)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("name", "one", "Found multiple configs for application"),
        ("route_prefix", "/", "duplicate applications for route prefix"),
        (
            "args",
            {"engine": {"model": "a/one"}},
            "it has the model name 'a/one' and the index.key_prefix 'kvray' of 'one'",
        ),
    ],
)
def test_models_that_would_collide_are_refused(key: str, value: Any, says: str) -> None:
    wrong = two_models()
    wrong["applications"][1][key] = value
    problems, _ = check_serve_document(wrong)
    assert any(says in problem for problem in problems), problems


def test_one_model_twice_is_fine_under_two_index_prefixes() -> None:
    both = two_models()
    both["applications"][1]["args"] = {"engine": {"model": "a/one"}, "index": {"key_prefix": "second"}}
    assert check_serve_document(both)[0] == []


def test_changed_configurations_are_deployed_without_the_address_of_redis() -> None:
    original = document(index={"redis_url": "redis://:secret@h", "heartbeat_s": 0.25}, engine={"model": "x/y"})
    file = parse_serve_document(copy.deepcopy(original))
    engine = file.models[0].config.engine.model_copy(update={"threads": 3})
    changed = file.with_configs([file.models[0].config.model_copy(update={"engine": engine})])
    args = changed.document["applications"][0]["args"]
    assert args["engine"] == {"model": "x/y", "threads": 3} and args["index"] == {"heartbeat_s": 0.25}
    assert changed.models[0].config.index.redis_url == "redis://:secret@h"
    assert "secret" not in str(changed.document)
    assert parse_serve_document(changed.document).models[0].config.engine.threads == 3
    assert file.document == original


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("applications: [\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "part.yaml").write_text("applications: []\nhttp_options: [1]\n")
    for name, says in (
        ("none.yaml", "cannot be read"),
        ("broken.yaml", "is not YAML"),
        ("list.yaml", "not a mapping"),
        ("part.yaml", "http_options: Input should be"),
    ):
        with pytest.raises(ConfigError) as raised:
            read_serve_file(tmp_path / name, port=1)
        assert says in raised.value.message and "\n" not in raised.value.message


def test_two_applications_build(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private.build_app import build_app

    monkeypatch.setenv("KVRAY_REDIS_URL", "redis://127.0.0.1:1")
    states = set()
    for application in two_models()["applications"]:
        built = build_app(build(application["args"]), name=application["name"])
        assert {deployment.name for deployment in built.deployments} == {"Ingress", "LLMWorker"}
        for deployment in built.deployments:
            if deployment.name == "LLMWorker":
                (config,) = deployment.init_args
                states.add((config["index"]["key_prefix"], config["engine"]["model"], config["index"]["redis_url"]))
    assert states == {("kvray", f"a/{name}", "redis://127.0.0.1:1") for name in ("one", "two")}


def test_without_redis_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVRAY_REDIS_URL", raising=False)
    with pytest.raises(ConfigError, match="no Redis: set KVRAY_REDIS_URL"):
        build({})
    with pytest.raises(ConfigError, match="args/engine/modle: unknown key"):
        build({"engine": {"modle": "x"}})
