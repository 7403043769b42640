"""Everything that knows Redis: the connection, the keys, the Lua scripts in `scripts/`, a store per subject, the embedded server.

Every method of a store raises `StoreUnavailable`, and only that, when Redis is away or refuses a command (-LOADING, -OOM, -READONLY,
-MISCONF and the like).
"""
