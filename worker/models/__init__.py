"""Model backends: they run one batch over the paged pool and return logits."""
