"""Text and tokens: tokenizer, vocabulary, chat template, and what a model's files say about them."""
