"""What `verbatim bench` does: calls on two ways, what the service says of itself meanwhile, and the report."""
