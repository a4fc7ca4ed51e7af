"""`diptych top`: the dashboard in a terminal."""
