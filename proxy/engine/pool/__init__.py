"""The replicas: where they come from, which of them serve, and which one a call goes to."""
