"""The HTTP server of `verbatim serve`: its processes, connections and logs."""
