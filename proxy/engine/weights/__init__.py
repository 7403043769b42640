"""Pushes a trainer's weights into the replicas."""
