"""compose.yaml brought up on a real Docker engine, broken on purpose and taken down: `make test-compose`. Not part of `make test`.

__main__   the command          scene.py   what happens, step by step      journal.py  checks, times, the table
stack.py   docker and compose   questions.py  what is asked, and the truth   panels.py   what Grafana would show
mistakes.py   what operators type wrong
"""
