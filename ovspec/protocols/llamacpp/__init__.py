"""What llama.cpp's clients ask for."""
