"""`verbatim generate`: tasks are attempted until enough attempts are accepted, and the accepted become files."""
