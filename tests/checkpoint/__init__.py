"""`fsdp2.checkpoint`."""
