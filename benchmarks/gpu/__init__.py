"""The sections of benchmarks.gpu_check, one module per concept."""
