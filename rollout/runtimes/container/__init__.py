"""Runtimes in containers: podman, docker and apptainer."""
