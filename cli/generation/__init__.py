"""`verbatim generate`: sample tasks until enough attempts pass, and write the accepted ones to files."""
