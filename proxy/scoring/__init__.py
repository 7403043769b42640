"""Scores: what another model, or the same one without a grammar, says of the tokens that calls sampled."""
