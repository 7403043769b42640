"""The `verbatim` command: the one place that may import everything."""
