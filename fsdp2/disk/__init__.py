"""Files on a local disk: direct I/O, unnamed files, and files mapped as memory. Layer: ground."""
