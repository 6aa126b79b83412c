"""Generated gRPC stubs of kvray.v1 (`make proto`). Nothing is written by hand here."""
