"""Initialisation: meta devices, deferred, seeded, materialised."""
