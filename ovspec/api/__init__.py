"""The public API: loading, the model, sessions and their files, verification, comparison."""
