"""One module a subcommand: its flags, and the step from flags to a frozen configuration."""
