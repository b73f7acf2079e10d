"""How the parts of a buffer work together: the verbs, and what several parts are made of."""
