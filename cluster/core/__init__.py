"""The pure vocabulary of kvray: standard library only."""
