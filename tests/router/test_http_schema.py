"""Which bodies the OpenAI endpoints accept, and that every refusal names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.core.errors import InvalidRequest
from router.generation import GenerationCall
from router.http_schema import ChatBody, CompletionBody, parse

CHAT: list[Any] = [{"role": "user", "content": "hi"}]


def call_of(kind: type[CompletionBody | ChatBody], body: Any) -> GenerationCall:
    return parse(kind, body if isinstance(body, bytes) else json.dumps(body).encode()).call()


def refusal(kind: type[CompletionBody | ChatBody], body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        call_of(kind, body)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [("a", "a", None), (["a"], "a", None), ([1, 2], None, (1, 2)), ([[1, 2]], None, (1, 2)), ("", "", None)],
)
def test_prompt_forms(prompt: Any, text: str | None, token_ids: Any) -> None:
    call = call_of(CompletionBody, {"prompt": prompt})
    assert (call.text, call.token_ids) == (text, token_ids)


def test_content_parts_and_roles() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "sys"},
        {"role": "user", "content": parts, "name": "bob"},
        {"role": "assistant", "content": "ok", "tool_calls": None, "refusal": None},
    ]
    assert call_of(ChatBody, {"messages": messages}).messages == [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "a\nb", "name": "bob"},
        {"role": "assistant", "content": "ok"},
    ]


def test_harmless_fields_and_nulls_are_fine() -> None:
    harmless = {
        "logprobs": False,
        "echo": False,
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "temperature": None,
        "max_tokens": None,
        "stop": None,
        "seed": None,
        "stream": None,
        "unknown_field": {"x": 1},
    }
    call = call_of(ChatBody, {"messages": CHAT, "cache_salt": "s", **harmless})
    assert call.sampling == {}
    assert call.cache_salt == "s"


def test_raw_values_reach_the_service() -> None:
    body = {"prompt": "a", "max_tokens": -1, "temperature": 1, "stop": ["a", "b"], "stop_token_ids": [1]}
    assert call_of(CompletionBody, body).sampling == {
        "max_tokens": -1,
        "temperature": 1,
        "stop": ("a", "b"),
        "stop_token_ids": (1,),
    }


def test_every_sampling_field_arrives() -> None:
    plain = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "seed": 3,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "prompt_logprobs": 0,
        "n": 2,
    }
    bias = {"logit_bias": {"12": -100, "7": 1.5}}
    wanted = {**plain, "logit_bias": ((12, -100), (7, 1.5))}
    assert call_of(CompletionBody, {"prompt": "a", "logprobs": 5, **plain, **bias}).sampling == wanted | {"logprobs": 5}
    chat = {"messages": CHAT, "logprobs": True, **plain, **bias}
    assert call_of(ChatBody, chat).sampling == wanted | {"logprobs": 0}
    assert call_of(ChatBody, {**chat, "top_logprobs": 20}).sampling == wanted | {"logprobs": 20}


def test_echo_asks_for_the_prompts_log_probabilities_too() -> None:
    call = call_of(CompletionBody, {"prompt": "a", "echo": True, "logprobs": 2})
    assert call.echo and call.sampling == {"max_tokens": 16, "logprobs": 2, "prompt_logprobs": 2}
    call = call_of(CompletionBody, {"prompt": "a", "echo": True, "prompt_logprobs": 1})
    assert call.echo and call.sampling == {"max_tokens": 16, "prompt_logprobs": 1}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", "body"),
        (b"", "body"),
        (b'{"prompt": "\xff"}', "body"),
        (b'{"prompt": "\\ud800"}', "body"),
        (b"[1]", "body"),
        (b'"text"', "body"),
        (b"[" * 100_000, "body"),
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 5.5}, "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "temperature": "0.1"}, "temperature"),
        ({"prompt": "a", "stream": 1}, "stream"),
        ({"prompt": "a", "stream": "true"}, "stream"),
        ({"prompt": "a", "stop": 1}, "stop"),
        ({"prompt": "a", "stop": ["a", 1]}, "stop"),
        ({"prompt": "a", "stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
        ({"prompt": "a", "model": 1}, "model"),
        ({"prompt": "a", "cache_salt": 1}, "cache_salt"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"prompt": "a", "n": "2"}, "n"),
        ({"prompt": "a", "use_beam_search": True, "beam_width": 0}, "beam_width"),
        ({"prompt": "a", "use_beam_search": False, "beam_width": 4}, "beam_width"),
        ({"prompt": "a", "use_beam_search": True, "best_of": 0}, "best_of"),
        ({"prompt": "a", "use_beam_search": True, "best_of": 2, "n": 3}, "best_of"),
        ({"prompt": "a", "use_beam_search": True, "n": 0}, "n"),
        ({"prompt": "a", "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "a", "best_of": 3.5}, "best_of"),
        ({"prompt": "a", "suffix": "x"}, "suffix"),
        ({"prompt": "a", "presence_penalty": "0.5"}, "presence_penalty"),
        ({"prompt": "a", "frequency_penalty": True}, "frequency_penalty"),
        ({"prompt": "a", "repetition_penalty": []}, "repetition_penalty"),
        ({"prompt": "a", "min_p": "0.1"}, "min_p"),
        ({"prompt": "a", "min_tokens": 1.5}, "min_tokens"),
        ({"prompt": "a", "include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"prompt": "a", "logit_bias": [[1, 2]]}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"one": 2}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"-1": 2}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"": 2}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1.0": 2}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1" * 5000: 2}}, "logit_bias"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": "5"}, "logprobs"),
        ({"prompt": "a", "prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt": "a", "echo": 1}, "echo"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_completions_name_the_field(body: Any, param: str) -> None:
    error = refusal(CompletionBody, body)
    assert error.field == param
    assert param in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [*CHAT, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": CHAT, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": CHAT, "tool_choice": "required"}, "tool_choice"),
        ({"messages": CHAT, "max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"messages": CHAT, "logprobs": 1}, "logprobs"),
        ({"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": CHAT, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"messages": CHAT, "logprobs": True, "top_logprobs": "2"}, "top_logprobs"),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": CHAT, "logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_chats_name_the_field(body: Any, param: str) -> None:
    error = refusal(ChatBody, body)
    assert error.field == param
    assert param in error.message


def test_errors_never_repeat_the_prompt() -> None:
    error = refusal(CompletionBody, {"prompt": {"my secret": "text"}, "temperature": "my secret"})
    assert "my secret" not in str(error.to_wire())
