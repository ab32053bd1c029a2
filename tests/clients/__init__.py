"""Clients of FSDP2, unmodified, on torch's FSDP2 and on ours: `make test-clients`."""
