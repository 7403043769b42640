"""What runs inside or starts vLLM; the service does not import it."""
