"""The generation loop: the runtime that makes rows, rounds over them, and the scheduler that runs them."""
