"""Tasks and their rollouts, as the service keeps them: the routes, and what it does for them in the background."""
