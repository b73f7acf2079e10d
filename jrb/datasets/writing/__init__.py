"""What a buffer holds, written in other libraries' layouts."""
