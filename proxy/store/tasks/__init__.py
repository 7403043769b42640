"""Tasks and rollouts in Redis: keys, Lua scripts, the store of servers (`tasks`) and of nodes (`work`)."""
