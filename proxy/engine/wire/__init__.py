"""The connections to engines."""
