"""Every wrong request gets a typed error that names what to change; nothing is lost and serving goes on."""

from __future__ import annotations

from typing import Any

import grpc
import httpx2 as httpx
import pytest

from cluster.rpc import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(300)]

Options = pb.SamplingOptions

GRPC_CASES: list[tuple[str, pb.GenerateRequest, grpc.StatusCode, str]] = [
    ("no input", pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    ("empty text", pb.GenerateRequest(text=""), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    ("no tokens", pb.GenerateRequest(token_ids=pb.TokenIds()), grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
    ("no messages", pb.GenerateRequest(chat=pb.ChatMessages()), grpc.StatusCode.INVALID_ARGUMENT, "messages"),
    ("unknown model", pb.GenerateRequest(model="nope", text="x"), grpc.StatusCode.NOT_FOUND, "nope"),
    ("bad id", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
    (
        "negative max_tokens",
        pb.GenerateRequest(text="x", sampling=Options(max_tokens=-5)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "max_tokens",
    ),
    (
        "negative temperature",
        pb.GenerateRequest(text="x", sampling=Options(temperature=-1)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "temperature",
    ),
    (
        "temperature not a number",
        pb.GenerateRequest(text="x", sampling=Options(temperature=float("nan"))),
        grpc.StatusCode.INVALID_ARGUMENT,
        "temperature",
    ),
    ("top_p 2", pb.GenerateRequest(text="x", sampling=Options(top_p=2)), grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
    (
        "bias of a token that is not there",
        pb.GenerateRequest(text="x", sampling=Options(logit_bias={10**6: 1.0})),
        grpc.StatusCode.INVALID_ARGUMENT,
        "logit_bias",
    ),
    ("priority", pb.GenerateRequest(text="x", priority=-(2**31)), grpc.StatusCode.INVALID_ARGUMENT, "priority"),
    ("timeout below 0", pb.GenerateRequest(text="x", timeout_s=-1), grpc.StatusCode.INVALID_ARGUMENT, "timeout_s"),
    (
        "timeout not a number",
        pb.GenerateRequest(text="x", timeout_s=float("nan")),
        grpc.StatusCode.INVALID_ARGUMENT,
        "timeout_s",
    ),
    ("no time at all", pb.GenerateRequest(text="x", timeout_s=0), grpc.StatusCode.DEADLINE_EXCEEDED, "0 s"),
    ("prompt over the limit", pb.GenerateRequest(text="word " * 5000), grpc.StatusCode.INVALID_ARGUMENT, "4096"),
    (
        "answer over the limit",
        pb.GenerateRequest(text="x", sampling=Options(max_tokens=4096)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "4096",
    ),
]

HTTP_CASES: list[tuple[str, str, bytes | dict[str, Any], int, str]] = [
    ("empty prompt", "completions", {"prompt": ""}, 400, "prompt"),
    ("no messages", "chat/completions", {"messages": []}, 400, "messages"),
    ("unknown model", "completions", {"model": "nope", "prompt": "x"}, 404, "nope"),
    ("negative max_tokens", "completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    ("negative temperature", "completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("max_tokens as text", "completions", {"prompt": "x", "max_tokens": "5"}, 400, "max_tokens"),
    ("penalty 3", "completions", {"prompt": "x", "presence_penalty": 3}, 400, "presence_penalty"),
    ("stop id that is not there", "completions", {"prompt": "x", "stop_token_ids": [10**6]}, 400, "stop_token_ids"),
    ("21 alternatives", "completions", {"prompt": "x", "logprobs": 21}, 400, "logprobs"),
    ("length_penalty alone", "completions", {"prompt": "x", "length_penalty": 0.5}, 400, "length_penalty"),
    ("priority as text", "completions", {"prompt": "x", "priority": "high"}, 400, "priority"),
    ("priority of 41 bits", "completions", {"prompt": "x", "priority": 2**40}, 400, "priority"),
    ("priority true", "completions", {"prompt": "x", "priority": True}, 400, "priority"),
    ("priority 1.5", "completions", {"prompt": "x", "priority": 1.5}, 400, "priority"),
    ("timeout below 0", "completions", {"prompt": "x", "timeout_s": -1}, 400, "timeout_s"),
    ("timeout as text", "completions", {"prompt": "x", "timeout_s": "x"}, 400, "timeout_s"),
    ("timeout not a number", "completions", b'{"prompt": "x", "timeout_s": NaN}', 400, "timeout_s"),
    ("timeout without end", "completions", b'{"prompt": "x", "timeout_s": 1e999}', 400, "timeout_s"),
    ("no time at all", "completions", {"prompt": "x", "timeout_s": 0}, 504, "0 s"),
    ("prompt as number", "completions", {"prompt": 5}, 400, "prompt"),
    ("messages as text", "chat/completions", {"messages": "hello"}, 400, "messages"),
    ("over the limit", "completions", {"prompt": "word " * 5000}, 400, "4096"),
    ("larger than the pool", "completions", {"prompt": "x", "max_tokens": 1_000_000}, 400, "4096"),
    ("not JSON", "completions", b"{", 400, "JSON"),
    ("not an object", "completions", b"[1]", 400, "object"),
    ("invalid UTF-8", "completions", b'{"prompt": "\xff\xfe"}', 400, "UTF-8"),
]


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_lost(cluster: Any) -> Any:
    """Block counts are the same before and after all bad requests."""

    def counts() -> list[tuple[int, int, int]]:
        replicas = cluster.settled().replicas
        return sorted((r.free_blocks + r.cached_blocks, r.in_use_blocks, r.total_blocks) for r in replicas)

    before = counts()
    yield
    assert counts() == before


@pytest.mark.parametrize(("call", "code", "says"), [c[1:] for c in GRPC_CASES], ids=[c[0] for c in GRPC_CASES])
def test_grpc(cluster: Any, call: pb.GenerateRequest, code: grpc.StatusCode, says: str) -> None:
    for method in (cluster.stub().GenerateOnce, lambda *a, **k: list(cluster.stub().Generate(*a, **k))):
        with pytest.raises(grpc.RpcError) as caught:
            method(call, timeout=60)
        assert caught.value.code() is code
        assert says in caught.value.details()


@pytest.mark.parametrize(("path", "body", "code", "says"), [c[1:] for c in HTTP_CASES], ids=[c[0] for c in HTTP_CASES])
def test_http(cluster: Any, path: str, body: bytes | dict[str, Any], code: int, says: str) -> None:
    url = f"{cluster.http_url}/v1/{path}"
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    reply = httpx.post(url, timeout=60, **content)
    assert reply.status_code == code
    error = reply.json()["error"]
    assert says in f"{error['message']} {error['param']}"


@pytest.mark.parametrize(("field", "value"), [("max_tokens", -1), ("priority", 2**40), ("timeout_s", -1)])
def test_streaming_http_error_has_a_status_of_its_own(cluster: Any, field: str, value: int) -> None:
    body = {"prompt": "x", field: value, "stream": True}
    assert httpx.post(f"{cluster.http_url}/v1/completions", json=body, timeout=60).status_code == 400


def test_still_serving_afterwards(cluster: Any) -> None:
    call = pb.GenerateRequest(text="The sky is", sampling=Options(temperature=0, max_tokens=4))
    assert cluster.stub().GenerateOnce(call, timeout=60).token_ids


def test_a_client_that_goes_away_frees_its_blocks(cluster: Any) -> None:
    call = pb.GenerateRequest(text="Tell me everything.", sampling=Options(max_tokens=2000, ignore_eos=True))
    stream = cluster.stub().Generate(call, timeout=120)
    next(iter(stream))
    stream.cancel()
    cluster.settled(timeout_s=20)


def test_deadline_frees_the_request(cluster: Any) -> None:
    call = pb.GenerateRequest(text="Tell me everything.", sampling=Options(max_tokens=2000, ignore_eos=True))
    with pytest.raises(grpc.RpcError) as caught:
        cluster.stub().GenerateOnce(call, timeout=2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    cluster.settled(timeout_s=20)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_field_timeout_s_frees_the_request(cluster: Any, protocol: str) -> None:
    if protocol == "http":
        body = {"prompt": "Tell me everything.", "max_tokens": 2000, "ignore_eos": True, "timeout_s": 2, "priority": -1}
        reply = httpx.post(f"{cluster.http_url}/v1/completions", json=body, timeout=60)
        assert (reply.status_code, reply.json()["error"]["message"]) == (504, "the deadline of 2 s passed")
    else:
        options = Options(max_tokens=2000, ignore_eos=True)
        call = pb.GenerateRequest(text="Tell me everything.", sampling=options, timeout_s=2, priority=-1)
        with pytest.raises(grpc.RpcError) as caught:
            cluster.stub().GenerateOnce(call, timeout=60)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert caught.value.details() == "the deadline of 2 s passed"
    cluster.settled(timeout_s=20)
