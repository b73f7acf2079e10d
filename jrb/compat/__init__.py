"""Interfaces of other libraries to jrb's buffers, for programs written for these libraries."""
