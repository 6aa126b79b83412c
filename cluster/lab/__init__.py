"""Experiments: the claims about paged KV memory and prefix caching, shown and measured."""
