"""What the files of a checkpoint say: headers, manifests, checksums. Layer: checkpoint."""
