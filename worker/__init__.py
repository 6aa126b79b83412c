"""One inference replica: scheduler, KV cache, model and kernels."""
