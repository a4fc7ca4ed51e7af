"""Two pools in virtual time: what a policy does to time to first token and to prefix hits, on recorded loads."""
