"""The demo model in fp32 through the paged path answers exactly as transformers' generate()."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from cluster.config import CacheConfig, EngineConfig
from cluster.core.sampling import SamplingParams
from worker.batch import Batch, ScheduledSeq
from worker.model_runner import ModelRunner

pytestmark = pytest.mark.model

NEW_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0)
QUESTIONS = [
    "What is the capital of France?",
    "Write one line of Python that adds 123 and 45.",
    "Tell me about rivers.",
]


def test_three_prompts_together_equal_generate(demo_model_dir: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_dir)
    reference = transformers.AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32)
    reference.generation_config.eos_token_id = None  # both sides go on to the full length
    prompts, wanted = [], []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt").input_ids
        mask = torch.ones_like(ids)
        out = reference.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=2)
        prompts.append(ids[0].tolist())
        wanted.append(out[0, ids.shape[1] :].tolist())

    cache = CacheConfig(kv_memory=2**28)
    runner = ModelRunner(EngineConfig(dtype="float32", device="cpu", threads=1, cache=cache), demo_model_dir)
    assert runner.facts.eos_token_ids == (2,)
    texts, starts = [list(prompt) for prompt in prompts], [0] * len(prompts)
    for _ in range(NEW_TOKENS):
        parts = tuple(
            ScheduledSeq(str(i), tuple(text[start:]), start, tuple(range(i * 8, i * 8 + 8)), True, GREEDY)
            for i, (text, start) in enumerate(zip(texts, starts, strict=True))
        )
        starts = [len(text) for text in texts]
        for text, token in zip(texts, runner.run(Batch(parts)), strict=True):
            text.append(token.token_id)
    made = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    assert made == wanted
    assert "Paris" in tokenizer.decode(made[0])
