"""RMS norm in Triton, tuned and served by kdatune."""
