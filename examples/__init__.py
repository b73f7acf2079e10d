"""Example programs that use jrb. The tests run all of them."""
