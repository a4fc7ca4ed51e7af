"""Our engine beside other engines, each in an environment and a process of its own, in turns: `python -m bench peers`.

run.py      the rounds                        of_*.py     one engine each, run by its own Python
subjects.py who takes part, and in what form  child.py    what an engine's process says and is asked
report.py   tables and notes                  forms.py    the checkpoint in the forms that engines read
"""
