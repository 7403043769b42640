"""Everything that knows Redis: keys in one place, Lua scripts as .lua files, the embedded server.

The `*_store` modules are the store as the rest of the service sees it: small Protocols and the values they exchange. Every method
of theirs raises `StoreUnavailable` when Redis cannot take or give what was asked (connection, -LOADING, -OOM, -READONLY,
-MISCONF), and only that.
"""
