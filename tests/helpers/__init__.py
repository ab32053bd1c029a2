"""What tests share; no tests. See `ranks.py` for how a test runs on several processes."""
