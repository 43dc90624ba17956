"""What ``import ovspec`` hands out: loading, the model, sessions and their files, verification, comparison."""
