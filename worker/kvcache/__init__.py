"""Paged KV memory: pool accounting, prefix tree, and the tensors."""
