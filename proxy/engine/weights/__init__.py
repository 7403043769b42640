"""Weight updates: a trainer's weights into the replicas, and repair of replicas that lack them."""
