"""What everything stands on: descriptions and states, checks, random bits, trees, ordering."""
