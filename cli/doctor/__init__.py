"""What `diptych doctor` looks at. `finding.py` is the form of an answer, the other modules ask the questions."""
