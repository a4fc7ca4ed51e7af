"""Who is let in, when, and how much: rate limits, the fair queue, and what is said to those who are not let in."""
