"""A folder of checkpoints: leases, commits, what replaces what, what is deleted when. Layer: checkpoint."""
