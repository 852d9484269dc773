"""What is sharded and when it is whole. Knows nothing of Lightning."""
