"""A leased batch as the trainers people already use want it, one module per trainer."""
