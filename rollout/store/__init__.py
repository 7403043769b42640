"""Everything of the rollout service that knows Redis."""
