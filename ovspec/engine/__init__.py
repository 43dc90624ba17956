"""The generation loop: the runtime makes rows, and the scheduler runs rounds over them."""
