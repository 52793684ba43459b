"""What may be passed as an argument, and how an error says what was wrong."""
