"""The OpenAPI description of the service: each group of endpoints with its examples and the shapes of its answers."""
