"""The content of a checkpoint's files: headers, manifests, checksums. Layer: checkpoint."""
