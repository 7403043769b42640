"""Tasks in, finished sessions out: harness launchers, runtimes, evaluators, worker node."""
