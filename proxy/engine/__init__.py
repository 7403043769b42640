"""Everything that knows the engines: token path, chat path, replica pool, weight updates."""
