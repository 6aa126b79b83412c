"""The parts of the sampler: what changes logits, which tokens stay in the draw, and log probabilities."""
