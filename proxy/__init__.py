"""The service: wire dialects in, engine out, records to Redis, trainer and admin API."""
