"""Basics for all other layers: errors, atomic files, bounded processes, progress and signals."""
