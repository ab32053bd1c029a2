"""The tests of fsdp2; see `ranks.py` for how a test runs on several processes."""
