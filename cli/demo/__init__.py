"""What `diptych demo` does: `questions` are asked by `asking`, shown by `screen`, summed up by `report`, in the order of `run`."""
