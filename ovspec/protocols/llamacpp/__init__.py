"""llama.cpp's API: infill and properties."""
