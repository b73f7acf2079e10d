"""What becomes of figures: files of JSON, tables in Markdown, plots. Reading needs no JAX."""
