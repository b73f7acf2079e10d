"""The methods of a buffer as compiled steps, and the arrays that hold its items."""
