"""The runtime: step > unit > param group > parameter, and what they stand on. Layer: runtime."""
