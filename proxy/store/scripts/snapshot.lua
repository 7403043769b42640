return snapshot()
