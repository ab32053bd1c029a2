"""What the files of a checkpoint say: boxes, tilings, headers, manifests, checksums. Layer: checkpoint."""
