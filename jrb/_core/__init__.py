"""The verbs, which let the parts of a buffer work together, and arrays of rows."""
