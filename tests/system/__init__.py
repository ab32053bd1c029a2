"""What a user starts or reads, and the structure of the repository."""
