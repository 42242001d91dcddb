"""A run that needs no download: made-up word problems, a tiny model and its warm start."""
