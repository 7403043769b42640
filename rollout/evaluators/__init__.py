"""Evaluators, which give rollouts their rewards: the interface in `base`, and a module per kind."""
