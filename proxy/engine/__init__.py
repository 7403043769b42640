"""Everything that knows an engine: kinds of engines, replica pool, connections, weight updates."""
