"""Plans that nobody wrote: their space, and how the best of them are found."""
