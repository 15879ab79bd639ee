"""Several servers as one: a router that knows what each holds, predicts when each would answer, and heals."""
