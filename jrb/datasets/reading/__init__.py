"""Readers of file formats, and the columns, ends of episodes and names that layouts share."""
