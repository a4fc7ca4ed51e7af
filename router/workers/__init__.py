"""The workers as one router knows them: who is there, what connects to them, what each carries, and whom to spare."""
