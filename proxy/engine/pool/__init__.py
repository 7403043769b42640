"""The replicas, which of them gets a call, and whether they are well."""
