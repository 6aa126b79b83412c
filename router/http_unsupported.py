"""OpenAI fields that would change the answer and are not supported here: refused by name, instead of being ignored.

Owns: the table of these fields, and which of their values ask for nothing.
Does not: know the fields that are supported (http_schema).
Invariants: absent and null are always fine, and so is a value with which the answer is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.core.errors import InvalidRequest

# Field -> the values that ask for nothing we lack.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json_object": (False,),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """InvalidRequest for the first field that cannot be honoured."""
    for name, harmless in _UNSUPPORTED.items():
        value = fields.get(name)
        if value is not None and not any(_same(value, other) for other in harmless):
            raise InvalidRequest(name, f"{name} is not supported{_or_only(harmless)}")


def _same(value: Any, other: Any) -> bool:
    # Python's True == 1, but JSON's true is no number.
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _or_only(harmless: tuple[Any, ...]) -> str:
    return "" if not harmless else f"; only {harmless[0]!r} is"
