"""Where harnesses run: one Protocol (`base`), one module per kind."""
