"""The machinery of the split loop; the algorithm itself is in the four Python files at the root."""
