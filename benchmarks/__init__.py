"""How fast jrb is, beside others, in one process and in turn."""
