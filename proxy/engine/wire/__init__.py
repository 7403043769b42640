"""HTTP connections to engines."""
