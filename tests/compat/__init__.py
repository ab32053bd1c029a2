"""fsdp2 beside torch's FSDP2, and in its place."""
