"""Benchmarks that print ratios against peers, measured in the same run: `python -m tests.bench [NAME...] [--json]`."""
