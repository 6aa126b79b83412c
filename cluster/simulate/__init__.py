"""The trace-driven simulator: the real scheduler and KV bookkeeping in virtual time."""
