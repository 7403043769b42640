"""How a replica is asked to sample: one module per engine API."""
