"""Who holds which chunk: the in-process index and its Redis feed."""
