"""The runtime: step > unit > bucket > parameter, and what they stand on. Layer: runtime."""
