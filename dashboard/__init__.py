"""What a person watches: the last minutes of one router and its workers, in numbers."""
