"""How a scheduled batch runs on the machine. Importing this package loads no torch; its modules do where they need it."""
