"""Several kinds of parallelism together."""
