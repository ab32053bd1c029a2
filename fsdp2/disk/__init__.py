"""Files on a disk of this machine: past the page cache, without a name, and as memory. Layer: ground."""
