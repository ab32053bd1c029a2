"""The tests of fsdp2. tests/README.md lists the folders; `helpers/ranks.py` runs a test on several processes."""
