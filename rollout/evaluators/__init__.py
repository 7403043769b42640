"""What gives a rollout its reward: one Protocol (`base`), one module per kind."""
