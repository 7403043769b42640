"""The control side of the HTTP contract: sessions, batches, weights. Thin: check, call the store, shape the answer."""
