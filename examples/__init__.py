"""Programs that use jrb, each of which the tests run."""
