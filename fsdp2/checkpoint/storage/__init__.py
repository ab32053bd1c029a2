"""Where bytes are: local folders, remote object stores. Layer: checkpoint."""
