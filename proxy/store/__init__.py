"""Everything that knows Redis: keys in one place, Lua scripts as .lua files, the embedded server."""
