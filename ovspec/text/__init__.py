"""Text and tokens: the tokenizer, the vocabulary, the chat template and a model's own generation defaults."""
