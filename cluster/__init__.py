"""What all processes must agree on, and the place where they are put together. Imports nothing."""
