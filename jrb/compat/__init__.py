"""Other libraries' interfaces over jrb's buffers, for programs that are written for them."""
