"""The runtime: sharding, gathering, reducing, and whatever a model does between them."""
