"""The checks of `kvray doctor`, one module per concept."""
