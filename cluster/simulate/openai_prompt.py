"""openai_prompt: what prompt an OpenAI body of a log means, also a body that kvray itself would refuse.

A log comes from any server, so here is taken what can be: parts that are no text count as nothing, tool calls and the
results of tools as their JSON, tool definitions as JSON at the beginning.

Owns: reading messages and prompts of several forms.
Does not: tokenise (cluster.tokenizer) or serve (router.http_fields says what kvray accepts).
Invariants: no error repeats anything of a body.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_AS_USER = ("tool", "function")


class BadLine(ValueError):
    """Says what is wrong with a line, without its text."""


def chat_messages(body: Mapping[str, Any]) -> tuple[list[dict[str, str]], int]:
    """Role and text of each message, and how many parts are no text."""
    given = body["messages"]
    if not isinstance(given, list) or not given:
        raise BadLine("messages must be a list that is not empty")
    messages, left_out = [], 0
    for message in given:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadLine("every message must be an object with a role")
        text, others = _text(message.get("content"))
        left_out += others
        calls = message.get("tool_calls") or message.get("function_call")
        role = "system" if message["role"] == "developer" else message["role"]
        messages.append({"role": role, "content": _joined(text, calls)})
    if tools := body.get("tools") or body.get("functions"):
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        messages[0]["content"] = _joined(json.dumps(tools), messages[0]["content"])
    return messages, left_out


def folded(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """For templates that know system, user and assistant only, in turns: results of tools are the user's."""
    turns: list[dict[str, str]] = []
    for message in messages:
        role = "user" if message["role"] in _AS_USER else message["role"]
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] = _joined(turns[-1]["content"], message["content"])
        else:
            turns.append({"role": role, "content": message["content"]})
    return turns


def text_prompt(body: Mapping[str, Any], vocab_size: int) -> str | list[int]:
    """Text, or token ids as they are."""
    prompt = body.get("prompt")
    if prompt is None:
        raise BadLine("the body has neither messages nor prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise BadLine(f"prompt holds {len(prompt)} prompts; write a line for each")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(type(token) is int and 0 <= token < vocab_size for token in prompt):
        raise BadLine(f"prompt must be a string or a list of token ids from 0 to {vocab_size - 1}")
    return prompt


def _text(content: Any) -> tuple[str, int]:
    if content is None:
        return "", 0
    if isinstance(content, str):
        return content, 0
    if not isinstance(content, list):
        raise BadLine("content must be a string or a list of parts")
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "\n".join(texts), len(content) - len(texts)


def _joined(text: str, more: Any) -> str:
    if not more:
        return text
    more = more if isinstance(more, str) else json.dumps(more)
    return f"{text}\n{more}" if text else more
