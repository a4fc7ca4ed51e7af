"""Which cores a process computes on and where its memory is: found, chosen, kept to. Torch-free."""
