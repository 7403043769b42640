"""Pages to look at sessions, groups and single tokens, for the admin. They show what the control API gives, and change nothing."""
