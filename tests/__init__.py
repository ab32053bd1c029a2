"""The tests of fsdp2. docs/testing.md lists the folders; `helpers/ranks.py` runs a test on several processes."""
