"""Rollouts that are run inside other frameworks, made sessions of the service: docs/integrations.md. Each imports its own framework."""
