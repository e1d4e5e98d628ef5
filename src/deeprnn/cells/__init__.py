"""What one step of a recurrence computes, described once for every backend."""
