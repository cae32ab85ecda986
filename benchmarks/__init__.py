"""Scripts that print figures; they assert nothing about time."""
