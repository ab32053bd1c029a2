"""The runtime: context > unit > param group > parameter, and what they stand on. Layer: runtime."""
