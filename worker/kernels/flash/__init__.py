"""Paged attention by flash_attn_varlen_func, from vllm-flash-attn or from the copy inside vLLM."""
