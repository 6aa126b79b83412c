"""Structured output through a real cluster: valid answers, and a bad schema is the client's mistake."""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx2 as httpx
import jsonschema
import openai
import pytest

from cluster.rpc import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(300)]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "coastal": {"type": "boolean"},
    },
    "required": ["city", "population", "coastal"],
    "additionalProperties": False,
}
BAD: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
MESSAGES: Any = [{"role": "user", "content": "Tell me about Paris as JSON: city, population, coastal."}]


def test_a_schema_is_followed_by_every_way(cluster: Any) -> None:
    client = openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="x", max_retries=0)
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    options: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 90, "temperature": 0}
    whole = client.chat.completions.create(**options, response_format=form).choices[0]
    assert whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.message.content or ""), SCHEMA)
    chunks = client.chat.completions.create(**options, stream=True, extra_body={"guided_json": SCHEMA})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    call = pb.GenerateRequest(
        chat=pb.ChatMessages(messages=[pb.ChatMessage(**message) for message in MESSAGES]),
        sampling=pb.SamplingOptions(temperature=0, max_tokens=90),
        constraint=pb.Constraint(json_schema=json.dumps(SCHEMA)),
    )
    assert cluster.stub().GenerateOnce(call, timeout=60).text == whole.message.content


def test_every_sample_is_a_choice(cluster: Any) -> None:
    body = {
        "prompt": "Is the sky green?",
        "n": 3,
        "temperature": 1.5,
        "seed": 1,
        "structured_outputs": {"choice": ["yes", "no", "perhaps"]},
    }
    reply = httpx.post(f"{cluster.http_url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    choices = reply.json()["choices"]
    assert len(choices) == 3
    assert {(choice["text"] in ("yes", "no", "perhaps"), choice["finish_reason"]) for choice in choices} == {
        (True, "stop")
    }


def test_a_bad_schema_is_the_clients_mistake_and_says_where(cluster: Any) -> None:
    for stream in (False, True):
        body = {"messages": MESSAGES, "stream": stream, "structured_outputs": {"json": BAD}}
        reply = httpx.post(f"{cluster.http_url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["param"] == "json_schema"
        assert "#/properties/a" in error["message"]
    call = pb.GenerateRequest(text="x", constraint=pb.Constraint(json_schema=json.dumps(BAD)))
    with pytest.raises(grpc.RpcError) as caught:
        cluster.stub().GenerateOnce(call, timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "#/properties/a" in caught.value.details()
    assert len(cluster.settled().replicas) == 2
