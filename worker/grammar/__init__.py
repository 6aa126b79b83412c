"""Structured output: constraints compiled against the tokenizer, and the masks of the tokens they allow.

Owns: everything that touches the grammar library (llguidance).
Does not: sample, or end requests.
Invariants: imports go one way: vocabulary <- grammar_state <- mask_set <- mask_worker <- grammar_service, and
schema_walk <- grammar_source <- compiled_grammar <- compiler <- grammar_service; only logits_mask and mask_worker need
torch.
"""
