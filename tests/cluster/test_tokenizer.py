"""Tokenizer: ids, chat templates, revisions, and equality with transformers."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from cluster.core.errors import ConfigError, InvalidRequest
from cluster.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n<|im_start|>{{ m['role'] }}: {{ m['content'] }}<|im_end|>\n{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox <é>"}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny byte-level BPE that puts a start token in front of every prompt."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(4)
    path = tmp_path_factory.mktemp("model")
    backend.save(str(path / "tokenizer.json"))
    write_config(
        path,
        {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}, "chat_template": TEMPLATE},
    )
    return path


def write_config(path: Path, config: dict[str, Any]) -> None:
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend", **config}))


@pytest.fixture
def copy(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "copy"))


def test_encode_adds_special_tokens_and_never_truncates(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(model_dir)
    text = "the quick brown fox é 漢 🎉"
    ids = tokenizer.encode(text)
    assert ids[0] == 0
    assert len(ids) > 4
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("") == [0]


@pytest.mark.torch
def test_chat_template_equals_transformers(model_dir: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(str(model_dir))
    tokenizer = Tokenizer.from_dir(model_dir)
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert tokenizer.apply_chat_template(CHAT) == expected
    assert tokenizer.apply_chat_template(CHAT)[:2] != [0, 0]


def test_where_each_message_of_a_chat_ends(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(model_dir)
    for count in (1, 2, 3):
        chat = [*CHAT, {"role": "user", "content": "  the fox\n"}][:count]
        ids, ends = tokenizer.encode_chat(chat)
        assert ids == tokenizer.apply_chat_template(chat)
        assert len(ends) == count
        for end, message in zip(ends, chat, strict=True):
            text = tokenizer.decode(ids[:end])
            assert text.endswith(message["content"]) and text != tokenizer.decode(ids[: end - 1])


@pytest.mark.parametrize(
    ("template", "known"),
    [
        ("{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}", True),
        ("{% if messages[0].role != 'system' %}You are good.{% endif %}{{ messages[-1].content }}", False),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content | length }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content }}{% if m.content == 'be brief' %}!{% endif %}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content }}{{ strftime_now('%f') }}{% endfor %}", False),
    ],
)
def test_a_template_that_changes_messages_does_not_say_where_they_end(copy: Path, template: str, known: bool) -> None:
    (copy / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_dir(copy)
    for _ in range(2):
        ids, ends = tokenizer.encode_chat(CHAT)
        assert ids == tokenizer.apply_chat_template(CHAT) or "strftime" in template
        assert (len(ends) == len(CHAT)) is known


def test_messages_with_more_than_a_role_and_a_text_have_no_known_ends(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(model_dir)
    assert tokenizer.encode_chat([{"role": "user", "content": "fox", "name": "x"}])[1] == ()
    assert tokenizer.encode_chat([{"role": "user", "content": ["fox"]}])[1] == ()


def test_template_file_wins_over_the_configuration(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{% generation %}{{ messages[0].content }}{% endgeneration %}")
    tokenizer = Tokenizer.from_dir(copy)
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "fox"}])) == "fox"


def test_list_of_templates_uses_the_default_one(copy: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write_config(copy, {"chat_template": named})
    tokenizer = Tokenizer.from_dir(copy)
    assert tokenizer.decode(tokenizer.apply_chat_template(CHAT)) == "plain"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<é>"}]'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ pad_token }}|{{ eos_token }}|", "||"),
    ],
)
def test_template_helpers(copy: Path, template: str, expected: str) -> None:
    write_config(copy, {"chat_template": template, "eos_token": "<|im_end|>"})
    tokenizer = Tokenizer.from_dir(copy)
    messages = [{"role": "user", "content": "<é>", "name": None}]
    assert tokenizer.decode(tokenizer.apply_chat_template(messages)) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ 1 + 'a' }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
    ],
)
def test_template_failures_name_the_messages(copy: Path, template: str) -> None:
    write_config(copy, {"chat_template": template})
    with pytest.raises(InvalidRequest) as caught:
        Tokenizer.from_dir(copy).apply_chat_template(CHAT)
    assert caught.value.field == "messages"


def test_no_template_and_no_messages(copy: Path, model_dir: Path) -> None:
    write_config(copy, {})
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer.from_dir(copy).apply_chat_template(CHAT)
    with pytest.raises(InvalidRequest, match="empty"):
        Tokenizer.from_dir(model_dir).apply_chat_template([])


def test_unpaired_surrogates_are_refused(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(model_dir)
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode("a\ud800")
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "a\udc00"}])
    assert caught.value.field == "messages"


def test_revision_follows_what_changes_ids(model_dir: Path, copy: Path) -> None:
    first = Tokenizer.from_dir(model_dir).revision
    assert Tokenizer.from_dir(copy).revision == first
    assert len(bytes.fromhex(first)) == 16
    write_config(copy, {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE + "x"})
    second = Tokenizer.from_dir(copy).revision
    content = json.loads((copy / "tokenizer.json").read_text())
    content["added_tokens"].pop()
    (copy / "tokenizer.json").write_text(json.dumps(content))
    assert len({first, second, Tokenizer.from_dir(copy).revision}) == 3


def test_vocabulary(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(model_dir)
    # The training text has fewer pairs than asked for, so the size is the backend's own count.
    assert 259 < tokenizer.vocab_size <= 300
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.is_silent(tokenizer.vocab_size)
    assert not tokenizer.is_silent(tokenizer.vocab_size - 1)
    assert tokenizer.decode([0, *tokenizer.encode("fox"), 10_000]) == "fox"


def test_threads(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(model_dir)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: tokenizer.apply_chat_template(CHAT), range(40)))
    assert all(ids == results[0] for ids in results)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": 1}'])
def test_broken_directories_are_configuration_errors(copy: Path, content: str) -> None:
    (copy / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError):
        Tokenizer.from_dir(copy)


def test_broken_template_is_a_configuration_error(copy: Path) -> None:
    write_config(copy, {"chat_template": "{% if %}"})
    with pytest.raises(ConfigError, match="chat template"):
        Tokenizer.from_dir(copy)


@pytest.mark.torch
def test_a_directory_without_a_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path / "empty")


@pytest.mark.model
def test_demo_model_equals_transformers(demo_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(demo_model_dir))
    tokenizer = Tokenizer.from_dir(demo_model_dir)
    for text in ("Hello, world!", "  two  spaces\n\ttab", "é漢🎉 12345", "<|im_start|>user\nhi<|im_end|>", ""):
        assert tokenizer.encode(text) == reference(text).input_ids
        assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(
            reference(text).input_ids, skip_special_tokens=True
        )
    for chat in (CHAT, CHAT[1:], [*CHAT, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "?"}]):
        expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert tokenizer.apply_chat_template(chat) == expected
