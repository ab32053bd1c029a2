"""Initialisation: meta devices, seeded, materialised."""
