"""`python -m cli` is the `diptych` command; the supervisor starts its children this way."""

from cli.main import main

if __name__ == "__main__":
    main()
