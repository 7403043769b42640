"""Kinds of engines, one module each, and what they share: details, ids as text, messages, local rendering."""
