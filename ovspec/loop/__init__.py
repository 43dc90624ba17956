"""The generation loop: rows of text, rounds over them, and the scheduler that lets rows join and leave."""
