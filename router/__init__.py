"""The front door: HTTP and gRPC, tokenising, hashing, and choosing a replica."""
