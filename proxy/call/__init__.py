"""One call of a harness, from its request to its record."""
