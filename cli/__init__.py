"""The `diptych` command: starts services and local clusters, and looks after the people who run them."""
