"""What buffers hold, written in other libraries' layouts."""
