"""Archives of sessions: their tables, and the folder of parts that holds them."""
