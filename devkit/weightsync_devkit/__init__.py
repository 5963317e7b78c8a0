"""For a checkout only, not part of the distribution: tiny checkpoints of every family, stock engines on this machine's
CPU, and the oracle that compares two engines. Used by the tests, the demo and the benchmarks."""
