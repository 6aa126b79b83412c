"""The scheduler's collaborators, one concept each: who waits, who runs, who has to go, what a step's result means."""
