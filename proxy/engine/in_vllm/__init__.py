"""What runs inside vLLM or starts it; the service does not import it."""
