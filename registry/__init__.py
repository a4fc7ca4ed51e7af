"""What processes of one deployment share through Redis: who is there, and whatever else several routers must agree on."""
