"""Everything of the rollout service that knows Redis: keys, Lua scripts, the store of servers (`tasks`) and of nodes (`work`)."""
