"""What formats are made of: formats of files, columns, the ends of episodes, names."""
