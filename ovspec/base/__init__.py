"""What everything else uses: errors, atomic files, bounded processes, progress and signals."""
