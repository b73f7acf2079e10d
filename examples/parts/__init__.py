"""Examples of custom parts, which extend the base classes in `jrb.types`: templates to copy."""
