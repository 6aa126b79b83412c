"""Tiny random models of many families: greedy tokens through the pool equal transformers' own generate()."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cluster.core.errors import ConfigError
from worker.kernels.base import AttentionMetadata, SequenceSpan
from worker.kernels.reference import ReferenceAttention
from worker.kvcache.kv_pool import KvGeometry, KvPool
from worker.models.attention_hook import PagedStep
from worker.models.transformers_backend import TransformersModel

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3"]
PLENTY = 2**33
BLOCK_SIZE = 4
NEW_TOKENS = 12


def load(path: Path) -> TransformersModel:
    torch.set_num_threads(1)
    return TransformersModel(path, dtype="float32", device=torch.device("cpu"), free_bytes=PLENTY)


class Paged:
    """Drives a model over a poisoned pool, one step at a time."""

    def __init__(self, model: TransformersModel, sequences: int) -> None:
        g = model.geometry
        shape = {"num_layers": g.num_layers, "num_kv_heads": g.num_kv_heads, "head_dim": g.head_dim}
        geometry = KvGeometry(**shape, block_size=BLOCK_SIZE, dtype=torch.float32)
        self.model, self.pool = model, KvPool(geometry, 40 * sequences, torch.device("cpu"))
        self.pool.tensor.fill_(float("nan"))
        torch.manual_seed(1)
        self.tables = torch.randperm(40 * sequences).split(40)

    @torch.inference_mode()
    def step(self, parts: Sequence[tuple[int, int, list[int]]]) -> list[int]:
        """parts: (sequence, start, tokens). The greedy next token after each part's last token."""
        spans, slots, positions, rows = [], [], [], []
        row = 0
        for sequence, start, tokens in parts:
            table, at = self.tables[sequence], torch.arange(start, start + len(tokens))
            slots.append(table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
            positions.append(at)
            spans.append(SequenceSpan(row=row, count=len(tokens), start=start, block_table=table))
            row += len(tokens)
            rows.append(row - 1)
        metadata = AttentionMetadata(spans=tuple(spans), slot_mapping=torch.cat(slots))
        token_ids = torch.tensor([token for _, _, tokens in parts for token in tokens])
        step = PagedStep(self.pool, ReferenceAttention(), metadata)
        logits = self.model.forward(token_ids, torch.cat(positions), torch.tensor(rows), step)
        assert logits.shape == (len(parts), self.model.vocab_size)
        return [int(token) for token in logits.argmax(-1)]


def prompts() -> list[list[int]]:
    torch.manual_seed(3)
    return [torch.randint(3, 96, (n,)).tolist() for n in (25, 1, 40, 7)]


def generate(path: Path, prompt: list[int]) -> list[int]:
    """transformers' own greedy answer, never ending early."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family: str, tiny_model_dir: Callable[[str], Path]) -> None:
    path = tiny_model_dir(family)
    wanted = [generate(path, prompt) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in wanted}) == 4, "the tiny model must not answer everything alike"

    paged = Paged(load(path), sequences=4)
    texts, starts = [list(prompt) for prompt in prompts()], [0] * 4
    # ragged: whole prompts, prompts in pieces of 6 tokens, prefill and decode in the same step
    piece = [100, 100, 6, 6]
    while any(len(text) < len(prompt) + NEW_TOKENS for text, prompt in zip(texts, prompts(), strict=True)):
        live = [s for s in range(4) if len(texts[s]) < len(prompts()[s]) + NEW_TOKENS]
        parts = [(s, starts[s], texts[s][starts[s] : starts[s] + piece[s]]) for s in live]
        for (s, start, tokens), token in zip(parts, paged.step(parts), strict=True):
            starts[s] = start + len(tokens)
            if starts[s] == len(texts[s]):
                texts[s].append(token)
    assert [text[len(prompt) :] for text, prompt in zip(texts, prompts(), strict=True)] == wanted


def test_geometry_and_facts(tiny_model_dir: Callable[[str], Path]) -> None:
    model = load(tiny_model_dir("llama"))
    g = model.geometry
    assert (g.num_layers, g.num_heads, g.num_kv_heads, g.head_dim) == (3, 4, 2, 8)
    assert (model.vocab_size, model.model_limit, model.eos_token_ids) == (96, 512, (2,))
    tied = sum(
        p.nbytes for p in transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir("llama")).parameters()
    )
    assert model.weight_bytes == tied
    assert load(tiny_model_dir("qwen3")).geometry.head_dim == 16


def test_list_of_eos_ids(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    path = copied(tiny_model_dir("llama"), tmp_path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert load(path).eos_token_ids == (2, 5)


def test_no_logit_rows(tiny_model_dir: Callable[[str], Path]) -> None:
    paged = Paged(load(tiny_model_dir("llama")), sequences=1)
    span = SequenceSpan(row=0, count=2, start=0, block_table=paged.tables[0])
    metadata = AttentionMetadata(spans=(span,), slot_mapping=paged.tables[0][0] * BLOCK_SIZE + torch.arange(2))
    step = PagedStep(paged.pool, ReferenceAttention(), metadata)
    none = torch.tensor([], dtype=torch.int64)
    with torch.inference_mode():
        assert paged.model.forward(torch.tensor([5, 6]), torch.arange(2), none, step).shape == (0, 96)


def copied(source: Path, target: Path) -> Path:
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def saved(tmp_path: Path, config: Any, model_class: Any = transformers.AutoModelForCausalLM) -> Path:
    torch.manual_seed(0)
    make = model_class.from_config if hasattr(model_class, "from_config") else model_class
    make(config).save_pretrained(tmp_path)
    return tmp_path


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def test_longrope_limits_the_length(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope["original_max_position_embeddings"] = 64
    config = transformers.Phi3Config(
        **SMALL, pad_token_id=0, max_position_embeddings=256, original_max_position_embeddings=64, rope_parameters=rope
    )
    assert load(saved(tmp_path, config)).model_limit == 64


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    return caught.value.message


def test_refuses_recurrent_state(tmp_path: Path) -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    assert "recurrent state" in refusal(saved(tmp_path, config))


def test_refuses_linear_attention_layers(tmp_path: Path, tiny_model_dir: Callable[[str], Path]) -> None:
    path = edited(
        tiny_model_dir("qwen3"), tmp_path, layer_types=["linear_attention", "full_attention", "full_attention"]
    )
    assert "linear_attention" in refusal(path)


def test_refuses_different_k_and_v_head_dims(tmp_path: Path) -> None:
    config = transformers.DeepseekV2Config(
        **SMALL,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        kv_lora_rank=8,
        q_lora_rank=None,
        first_k_dense_replace=2,
    )
    assert "K and V head dims differ (16 and 8)" in refusal(saved(tmp_path, config))


def test_refuses_kv_shared_across_layers(tmp_path: Path) -> None:
    config = transformers.Gemma3nTextConfig(
        **{**SMALL, "num_hidden_layers": 4}, num_kv_shared_layers=2, head_dim=16, vocab_size_per_layer_input=64
    )
    config.save_pretrained(tmp_path)
    assert "share KV across layers" in refusal(tmp_path)


def test_refuses_encoder_decoder(tmp_path: Path) -> None:
    transformers.BartConfig(vocab_size=64, d_model=32).save_pretrained(tmp_path)
    assert "encoder-decoder" in refusal(tmp_path)


def test_refuses_attention_outside_the_interface(tmp_path: Path) -> None:
    config = transformers.MptConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=4)
    config.save_pretrained(tmp_path)
    assert "does not support transformers' attention interface" in refusal(tmp_path)


def test_refuses_attention_sinks(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(**SMALL, head_dim=16, num_local_experts=2, num_experts_per_tok=1)
    assert "'s_aux'" in refusal(saved(tmp_path, config))


def test_refuses_quantised_checkpoints(tmp_path: Path, tiny_model_dir: Callable[[str], Path]) -> None:
    quantisation = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    assert "quantised" in refusal(edited(tiny_model_dir("llama"), tmp_path, quantization_config=quantisation))


def test_refuses_a_model_larger_than_the_device(tiny_model_dir: Callable[[str], Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"llama needs .* bytes\) for its weights in float32, but cpu has 1.0 KiB free"
    ):
        TransformersModel(tiny_model_dir("llama"), dtype="float32", device=torch.device("cpu"), free_bytes=1024)


def test_refuses_broken_directories(tmp_path: Path, tiny_model_dir: Callable[[str], Path]) -> None:
    assert "cannot read" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    assert "cannot read" in refusal(tmp_path)
    path = copied(tiny_model_dir("llama"), tmp_path)
    (path / "model.safetensors").write_bytes(b"short")
    assert "not a complete safetensors file" in refusal(path)
    (path / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal(path)


def edited(source: Path, target: Path, **changes: Any) -> Path:
    path = copied(source, target)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path
