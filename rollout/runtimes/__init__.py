"""The machine that rollouts run on: `base` is the contract of a runtime, `catalogue` lists the kinds."""
