"""What operators do, what fails at night, and what they hear of it."""
