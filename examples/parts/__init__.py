"""Parts of your own, written from the base classes in `jrb.types`: templates to copy."""
