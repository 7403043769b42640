"""What a trainer imports: the lease client, batches as arrays, weight publishing, advantages."""
