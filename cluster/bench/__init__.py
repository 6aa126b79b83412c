"""`kvray bench`: fixed workloads against kvray, its engine alone, and any OpenAI-compatible server, side by side."""
